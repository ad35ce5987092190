// Who shares whose keys and values, and what does that save of each token and of each step?
import { linear } from "lab/svg.js";
import { number, scaled, seconds } from "lab/format.js";

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing, gap = 14;
  const columns = width < 420 ? 2 : width < 760 ? 3 : 6;
  const each = (width - gap * (columns - 1)) / columns, tall = 232;
  const rows = Math.ceil(d.variants.length / columns);
  const most = Math.max(...d.variants.map((/** @type {any} */ one) => one.keeps));
  const choose = (/** @type {any} */ one) => one.kv_heads > 0 && !one.name.includes(",") && act({ kv_heads: one.kv_heads });
  return h`<div>
    <svg viewBox="0 0 ${width} ${rows * tall}" role="img" aria-labelledby="av-title av-desc">
      <title id="av-title">Which query heads share a KV head, in six ways</title>
      <desc id="av-desc">${d.variants.map((/** @type {any} */ one) => `${one.name}: ${one.bytes_per_token} bytes a token`).join("; ")}</desc>
      ${d.variants.map((/** @type {any} */ one, /** @type {number} */ i) => h`<g key=${one.name} transform="translate(${(i % columns) * (each + gap)} ${Math.floor(i / columns) * tall})" onClick=${() => choose(one)}>
        ${variant(h, one, each, most)}</g>`)}
    </svg>
    ${steps(h, d, width)}
  </div>`;
}

/** One way: its name, its wiring, its layers, and what one request keeps. @param {any} h @param {any} one @param {number} width @param {number} most */
function variant(h, one, width, most) {
  const top = 44, below = 104, q = linear([0, one.query_heads], [0, width]), wide = width / one.query_heads;
  const boxes = Math.max(1, one.kv_heads), isLatent = one.kv_heads === 0;
  const share = one.query_heads / boxes, boxWidth = width / boxes;
  const bar = Math.max(1.5, (width * one.keeps) / most);
  return h`
    <text class="strong" x="0" y="13">${one.name}</text>
    <text class="muted" x="0" y="29" >${one.title}</text>
    <g class="still">
      ${Array.from({ length: one.query_heads }, (_, i) => {
        const from = q(i) + wide / 2, box = Math.floor(i / share), to = boxWidth * (box + 0.5);
        return h`<path key=${i} d="M${from},${top + 9} C${from},${top + 34} ${to},${below - 30} ${to},${below}" stroke="var(--accent)" stroke-opacity=${one.query_heads > 40 ? 0.4 : 0.6} stroke-width=${one.query_heads > 40 ? 0.8 : 1.2} fill="none" />`;
      })}
      ${Array.from({ length: one.query_heads }, (_, i) => h`<rect key=${`q${i}`} x=${q(i) + wide * 0.12} y=${top} width=${Math.max(0.8, wide * 0.76)} height="10" rx=${Math.min(2, wide / 4)} fill="var(--accent)" />`)}
      ${Array.from({ length: boxes }, (_, i) => h`<rect key=${`k${i}`} x=${isLatent ? width * 0.22 : boxWidth * i + boxWidth * 0.1} y=${below} width=${isLatent ? width * 0.56 : Math.max(0.8, boxWidth * 0.8)} height="13" rx=${Math.min(2, boxWidth / 5)} fill="var(--kv)" />`)}
    </g>
    <text class="muted" x="0" y=${below + 29}>${isLatent ? "one latent vector" : `${one.kv_heads} KV ${one.kv_heads === 1 ? "head" : "heads"} for ${one.query_heads}`}</text>
    ${layers(h, one.layers, width, below + 38)}
    <text class="muted" x="0" y=${below + 72}>${scaled(one.bytes_per_token, "B")} a token</text>
    <rect x="0" y=${below + 79} width=${width} height="12" fill="var(--free)" />
    <rect x="0" y=${below + 79} width=${bar} height="12" fill="var(--kv)" />
    <text class="strong" x="0" y=${below + 107}>${scaled(one.keeps, "B")}</text>
    <text class="muted" x=${width} y=${below + 107} text-anchor="end">${one.keeps === most ? "a request" : `${number(most / one.keeps)} × less`}</text>`;
}

/** Which layers keep all tokens, those of a window, or none. @param {any} h @param {string[]} all @param {number} width @param {number} y */
function layers(h, all, width, y) {
  const wide = width / all.length, height = /** @type {Record<string, number>} */ ({ full: 14, window: 6, none: 1.5 });
  return h`<g class="still"><title>${all.length} layers: ${["full", "window", "none"].map((kind) => `${all.filter((one) => one === kind).length} ${kind === "none" ? "without a cache of their own" : kind}`).join(", ")}</title>
    ${all.map((kind, i) => h`<rect key=${i} x=${i * wide} y=${y + 16 - height[kind]} width=${Math.max(0.7, wide * 0.8)} height=${height[kind]} fill=${kind === "none" ? "var(--waiting)" : "var(--kv)"} fill-opacity=${kind === "window" ? 0.65 : 1} />`)}</g>`;
}

/** What one step reads, in each way. @param {any} h @param {any} d @param {number} width */
function steps(h, d, width) {
  const isNarrow = width < 520, left = isNarrow ? 0 : 104, right = isNarrow ? 0 : 76, row = isNarrow ? 38 : 26, top = 52;
  const most = Math.max(...d.variants.map((/** @type {any} */ one) => one.weights + one.reads));
  const w = linear([0, most], [0, width - left - right]);
  return h`<svg viewBox="0 0 ${width} ${top + d.variants.length * row}" role="img" aria-label="Bytes read in a step of ${d.batch} requests with ${d.context} tokens">
    <text class="strong" x="0" y="24">${isNarrow ? "A step reads" : `A step of ${d.batch} ${d.batch === 1 ? "request" : "requests"} with ${d.context.toLocaleString("en-US")} tokens reads`}</text>
    <g transform="translate(0 43)"><rect x=${left} y="-9" width="10" height="10" fill="var(--weights)" /><text class="muted" x=${left + 14} y="0">weights</text>
      <rect x=${left + 76} y="-9" width="10" height="10" fill="var(--kv)" /><text class="muted" x=${left + 90} y="0">keys and values</text>
      <text class="muted" x=${width} y="0" text-anchor="end">at best</text></g>
    ${d.variants.map((/** @type {any} */ one, /** @type {number} */ i) => {
      const y = top + i * row + (isNarrow ? 16 : 2), weights = w(one.weights), reads = w(one.reads);
      return h`<g key=${one.name}>
        <text x="0" y=${isNarrow ? y - 4 : y + 13}>${one.name}</text>
        <rect x=${left} y=${y} width=${weights} height="18" fill="var(--weights)" />
        <rect x=${left + weights} y=${y} width=${Math.max(1, reads)} height="18" fill="var(--kv)" />
        ${weights > 62 && h`<text class="on" x=${left + 6} y=${y + 13}>${scaled(one.weights, "B")}</text>`}
        ${reads > 62 ? h`<text class="on" x=${left + weights + 6} y=${y + 13}>${scaled(one.reads, "B")}</text>`
          : left + weights + reads + 64 < width - right && h`<text class="muted" x=${left + weights + reads + 6} y=${y + 13}>${scaled(one.reads, "B")}</text>`}
        <text class="strong" x=${width} y=${isNarrow ? y - 4 : y + 13} text-anchor="end">${seconds(one.seconds)}</text>
      </g>`;
    })}
  </svg>`;
}
