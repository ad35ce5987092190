// What is in each slot, from the first step to the last, in a static batch and in a continuous one?
import { useRef } from "preact/hooks";
import { axisX, linear } from "lab/svg.js";
import { number, seconds } from "lab/format.js";

const FILLS = /** @type {Record<string, string>} */ ({ prompt: "--accent", again: "--kv", answer: "--compute", held: "--communication" });
const WORDS = /** @type {Record<string, string>} */ ({
  prompt: "reads its prompt", again: "computes again what a preemption threw away", answer: "a token each step",
  held: "no room in the step", idle: "empty",
});

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  return h`<div><${Lanes} ...${{ h, d: answer.drawing, inputs, act, width }} />${spread(h, answer.drawing, width)}</div>`;
}

/** Both charts over one time. @param {any} props */
function Lanes({ h, d, inputs, act, width }) {
  const drag = useRef(/** @type {any} */ (null));
  const left = 4, right = width - 6, gap = 60, top = 34;
  const tall = Math.max(9, Math.min(20, 190 / d.slots)), high = tall * d.slots;
  const end = Math.max(d.static.end_s, d.continuous.end_s), x = linear([0, end], [left, right]);
  const charts = [d.static, d.continuous].map((lane, i) => ({ lane, y: top + i * (high + gap) }));
  const bottom = charts[1].y + high;
  const long = longest(d.static);
  const onDown = (/** @type {PointerEvent} */ event) => {
    drag.current = { px: event.clientX, tokens: inputs.longest, scale: (x(long.end) - x(long.start)) / inputs.longest };
    /** @type {Element} */ (event.currentTarget).setPointerCapture(event.pointerId);
  };
  const onMove = (/** @type {PointerEvent} */ event) => {
    if (!drag.current || !event.buttons) return;
    const { px, tokens, scale } = drag.current;
    const wanted = Math.round((tokens + (event.clientX - px) / scale) / 10) * 10;
    act({ longest: Math.max(2, inputs.shortest, Math.min(1000, wanted)) });
  };
  return h`<svg viewBox="0 0 ${width} ${bottom + 40}" role="img" aria-labelledby="ba-title ba-desc">
    <title id="ba-title">Slots over time: static batching above, continuous batching below</title>
    <desc id="ba-desc">Static batching takes ${d.static.num_steps} steps and leaves ${d.static.num_idle} slot-steps empty, continuous batching ${d.continuous.num_steps} steps and ${d.continuous.num_idle}.</desc>
    <defs><pattern id="ba-idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--free)" fill-opacity=".35" /><rect width="1.8" height="6" fill="var(--waiting)" fill-opacity=".75" /></pattern></defs>
    ${axisX({ scale: x, y: bottom, top: top - 4, ticks: x.ticks(width < 500 ? 4 : 8), format: (v) => (v ? seconds(v) : "0"), label: "" })}
    ${charts.map(({ lane, y }) => chart(h, lane, d, x, y, tall, width, inputs.lengths === "one long"))}
    ${long.end > 0 && inputs.lengths === "one long" && h`<g class="handle" onPointerDown=${onDown} onPointerMove=${onMove}>
      <title>Drag to change the longest answer</title>
      <rect x=${x(long.end) - 14} y=${charts[0].y + long.slot * tall - 5} width="28" height=${tall + 10} fill="transparent" />
      <rect x=${x(long.end) - 3} y=${charts[0].y + long.slot * tall - 3} width="6" height=${tall + 6} rx="3" fill="var(--text)" stroke="var(--panel)" />
    </g>`}
    ${legend(h, d, left, bottom + 36, width)}
  </svg>`;
}

/** Where the longest answer of the first static batch ends. @param {any} lane */
function longest(lane) {
  let best = { slot: 0, start: 0, end: 0, steps: 0 };
  for (const [slot, , kind, start, end, steps] of lane.pieces)
    if (kind === "answer" && steps > best.steps) best = { slot, start, end, steps };
  return best;
}

/** @param {any} h @param {any} lane @param {any} d @param {any} x @param {number} y @param {number} tall @param {number} width @param {boolean} isOneLong */
function chart(h, lane, d, x, y, tall, width, isOneLong) {
  const high = tall * d.slots, end = x(lane.end_s), isNarrow = width < 500;
  const done = `${lane.num_steps.toLocaleString("en-US")} steps, ${seconds(lane.end_s)}`;
  const hollow = lane.pieces.filter((/** @type {any} */ one) => one[2] === "idle").sort((/** @type {any} */ a, /** @type {any} */ b) => b[5] - a[5])[0];
  const room = hollow ? x(hollow[4]) - x(hollow[3]) : 0;
  const empty = `${lane.num_idle.toLocaleString("en-US")} slot-steps empty`;
  return h`<g>
    <text class="strong" x="4" y=${y - 14} font-size="13">${lane.name}</text>
    <text class="muted halo" x=${isNarrow ? width - 6 : Math.max(end, 380)} y=${y - 14} text-anchor="end">${isNarrow ? "" : `${empty}; `}${done}</text>
    ${lane.pieces.map((/** @type {any} */ piece) => block(h, piece, d, x, y, tall))}
    ${lane.preemptions.map((/** @type {any} */ [at, who]) => h`<g key=${`${at}${who}`}><title>request ${who} is preempted: its cache is given to others</title>
      <path d=${`M${x(at)},${y} l-4,-7 h8z`} fill="var(--kv)" /></g>`)}
    ${isOneLong && room > 150 && h`<text class="halo strong" font-size="14" x=${(x(hollow[3]) + x(hollow[4])) / 2} y=${y + high / 2 - (tall > 12 ? tall / 2 : 0) + 5} text-anchor="middle">${empty}</text>`}
    <line x1=${end} x2=${end} y1=${y - 3} y2=${y + high + 3} stroke="var(--text)" stroke-width="1.5" />
    ${!isNarrow && width - end > 120 && h`<text class="halo" x=${end + 8} y=${y + high / 2 + 4}>done: ${number(d.static.end_s / lane.end_s)} times as fast</text>`}
  </g>`;
}

/** @param {any} h @param {any} piece @param {any} d @param {any} x @param {number} y @param {number} tall */
function block(h, [slot, request, kind, start, end, steps], d, x, y, tall) {
  const from = x(start), wide = Math.max(0.7, x(end) - from), inner = wide > 3 ? wide - 0.8 : wide;
  const isIdle = kind === "idle", fill = isIdle ? "url(#ba-idle)" : `var(${FILLS[kind]})`;
  const said = isIdle ? "" : `request ${request}: `;
  return h`<g key=${`${slot}-${start}`}><title>slot ${slot + 1}, ${said}${WORDS[kind]}, ${steps} ${steps === 1 ? "step" : "steps"}, ${seconds(end - start)}</title>
    <rect x=${from} y=${y + slot * tall + 0.8} width=${inner} height=${tall - 1.6} rx=${wide > 6 && !isIdle ? 2 : 0} fill=${fill} fill-opacity=${isIdle || request % 2 ? 1 : 0.84} />
    ${!isIdle && wide > 74 && tall > 12 && h`<text fill="var(--on-accent)" x=${from + 7} y=${y + slot * tall + tall / 2 + 4} font-size="11">${kind === "answer" ? `${d.lengths[request]} tokens` : `${steps} ${steps > 1 ? "steps" : "step"}`}</text>`}</g>`;
}

/** Only of what is there. @param {any} h @param {any} d @param {number} x @param {number} y @param {number} width */
function legend(h, d, x, y, width) {
  const kinds = new Set([...d.static.pieces, ...d.continuous.pieces].map((one) => one[2]));
  const names = /** @type {Record<string, string>} */ ({ prompt: "prompt", answer: "answer", again: "again", held: "held", idle: "empty" });
  let at = x;
  return h`<g>${["prompt", "answer", "again", "held", "idle"].filter((kind) => kinds.has(kind)).map((kind) => {
    const from = at;
    at += 26 + names[kind].length * 7;
    return from < width - 30 && h`<g key=${kind}><title>${WORDS[kind]}</title><rect x=${from} y=${y - 10} width="11" height="11" rx="2" fill=${kind === "idle" ? "url(#ba-idle)" : `var(${FILLS[kind]})`} />
      <text class="muted" x=${from + 16} y=${y}>${names[kind]}</text></g>`;
  })}</g>`;
}

/** Use and latencies of both, on one scale each. @param {any} h @param {any} d @param {number} width */
function spread(h, d, width) {
  const rows = [
    ["slots used", (/** @type {any} */ one) => one.slot_share, (/** @type {number} */ v) => `${number(100 * v)} %`, "--compute"],
    ["half answered within", (/** @type {any} */ one) => one.p50_s, seconds, "--waiting"],
    ["99 % answered within", (/** @type {any} */ one) => one.p99_s, seconds, "--waiting"],
  ];
  const isNarrow = width < 560, columns = isNarrow ? 1 : 3, space = (width - 12) / columns, high = 74;
  const tall = Math.ceil(rows.length / columns) * high;
  return h`<svg viewBox="0 0 ${width} ${tall + 6}" role="img" aria-label=${rows.map(([name, of, say]) => `${name}: static ${/** @type {any} */ (say)(/** @type {any} */ (of)(d.static))}, continuous ${/** @type {any} */ (say)(/** @type {any} */ (of)(d.continuous))}`).join("; ")}>
    ${rows.map(([name, of, say, fill], i) => {
      const x0 = 4 + (i % columns) * space, y0 = 8 + Math.floor(i / columns) * high;
      const pair = [d.static, d.continuous].map((one) => ({ name: one.name, value: /** @type {any} */ (of)(one) }));
      const bar = linear([0, Math.max(...pair.map((one) => one.value)) || 1], [0, space - 158]);
      return h`<g key=${name}><text class="muted" x=${x0} y=${y0 + 12}>${name}</text>
        ${pair.map((one, j) => h`<g key=${one.name}>
          <text x=${x0} y=${y0 + 32 + j * 20}>${one.name}</text>
          <rect x=${x0 + 74} y=${y0 + 21 + j * 20} width=${Math.max(1, bar(one.value))} height="14" rx="2" fill=${`var(${fill})`} fill-opacity=${j ? 1 : 0.55} />
          <text class="strong" x=${x0 + 80 + Math.max(1, bar(one.value))} y=${y0 + 32 + j * 20}>${/** @type {any} */ (say)(one.value)}</text>
        </g>`)}</g>`;
    })}
  </svg>`;
}
