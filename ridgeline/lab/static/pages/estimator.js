// Does it fit, where does a token's time go, and what do more requests at once give and take?
import { axisX, axisY, linear, log } from "lab/svg.js";
import { number, scaled, seconds } from "lab/format.js";

const COLOURS = /** @type {Record<string, string>} */ ({ ideal: "var(--weights)", kernels: "var(--compute)", host: "var(--waiting)", "others' prompts": "var(--activations)" });

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  return h`<div>
    ${memory(h, d, width)}
    ${d.points.length > 0 ? h`${life(h, d, width)}${choice(h, d, act, width)}` : ways(h, d, width)}
  </div>`;
}

/** The memory of one device, line by line. @param {any} h @param {any} d @param {number} width */
function memory(h, d, width) {
  const needed = d.items.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.bytes, 0);
  const most = Math.max(needed, d.capacity_bytes), w = linear([0, most], [0, width - 2]);
  let x = 1, row = 0, used = 0;
  const bars = d.items.map((/** @type {any} */ one) => { const at = x; x += w(one.bytes); return { ...one, x: at, w: w(one.bytes) }; });
  const groups = [["weights", "weights"], ["kv", "KV cache"], ["activations", "working space"], ["waiting", "reserve"]].map(([means, name]) => ({
    means, text: `${name} ${scaled(d.items.filter((/** @type {any} */ one) => one.means === means).reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.bytes, 0), "B")}`,
  })).map((one) => { const wide = one.text.length * 6.4 + 28; if (used > 0 && used + wide > width) { used = 0; row += 1; } const at = used; used += wide; return { ...one, x: at, row }; });
  const room = w(d.capacity_bytes) + 1;
  return h`<svg viewBox="0 0 ${width} ${82 + row * 18}" role="img" aria-label="Memory of one device: ${scaled(needed, "B")} of ${scaled(d.capacity_bytes, "B")}">
    <text class="strong" x="0" y="13">Memory of ${d.devices > 1 ? `each of ${d.devices} devices` : "the device"}</text>
    <text class="muted" x=${width} y="13" text-anchor="end">${scaled(needed, "B")} of ${scaled(d.capacity_bytes, "B")}${width < 520 ? "" : " that may be taken"}</text>
    <rect x="1" y="22" width=${Math.max(1, room - 1)} height="30" fill="var(--free)" />
    ${bars.map((/** @type {any} */ one) => h`<g key=${one.name}><rect x=${one.x} y="22" width=${Math.max(0.5, one.w - 0.7)} height="30" fill="var(--${one.means})"><title>${one.name}: ${scaled(one.bytes, "B")}</title></rect>
      ${one.w > one.name.length * 6.4 + 12 && h`<text class="on" x=${one.x + 6} y="41">${one.name}</text>`}</g>`)}
    <line x1=${room} x2=${room} y1="16" y2="58" stroke="var(--text)" stroke-width="1.5" stroke-dasharray="5 3" />
    ${groups.map((one) => h`<g key=${one.means} transform="translate(${one.x} ${74 + one.row * 18})"><rect x="0" y="-9" width="10" height="10" fill="var(--${one.means})" /><text class="muted" x="14" y="0">${one.text}</text></g>`)}
  </svg>`;
}

/** One request from its arrival to its end, and the time of a token taken apart. @param {any} h @param {any} d @param {number} width */
function life(h, d, width) {
  const whole = d.token_parts.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.seconds, 0) || 1;
  const first = Math.max(2, (width * d.ttft_s) / d.whole_s), w = (/** @type {number} */ s) => (width * s) / whole;
  let x = 0, used = 0, row = 0;
  const parts = d.token_parts.filter((/** @type {any} */ one) => one.seconds > 0).map((/** @type {any} */ one) => {
    const text = `${one.what} ${seconds(one.seconds)}`, wide = text.length * 6.4 + 28;
    if (used > 0 && used + wide > width) { used = 0; row += 1; }
    const part = { ...one, x, w: w(one.seconds), text, at: used, row };
    x += part.w; used += wide;
    return part;
  });
  return h`<svg viewBox="0 0 ${width} ${158 + row * 18}" role="img" aria-label="First token after ${seconds(d.ttft_s)}, then one every ${seconds(whole)}, done after ${seconds(d.whole_s)}">
    <text class="strong" x="0" y="20">A request</text><text class="muted" x=${width} y="20" text-anchor="end">done after ${seconds(d.whole_s)}</text>
    <rect x="0" y="28" width=${width} height="16" fill="var(--kv)" fill-opacity=".35" />
    <rect x="0" y="28" width=${first} height="16" fill="var(--activations)" />
    <line x1=${first} x2=${first} y1="28" y2="50" stroke="var(--accent)" stroke-width="2" />
    <text class="halo" x=${Math.min(first + 5, width - 150)} y="60" fill="var(--accent)">first token after ${seconds(d.ttft_s)}</text>
    <path d="M${first},64 L0,92 M${Math.min(width, first + 6)},64 L${width},92" stroke="var(--line)" fill="none" />
    <text class="strong" x="0" y="88">Between two tokens</text><text class="muted" x=${width} y="88" text-anchor="end">${seconds(whole)}</text>
    ${parts.map((/** @type {any} */ one) => h`<rect key=${one.what} x=${one.x} y="96" width=${Math.max(0.5, one.w - 0.7)} height="24" fill=${COLOURS[one.what] ?? "var(--waiting)"}><title>${one.text}</title></rect>`)}
    ${parts.map((/** @type {any} */ one) => h`<g key=${`${one.what}.`} transform="translate(${one.at} ${139 + one.row * 18})"><rect x="0" y="-9" width="10" height="10" fill=${COLOURS[one.what] ?? "var(--waiting)"} /><text class="muted" x="14" y="0">${one.text}</text></g>`)}
  </svg>`;
}

/** What one gets against what all get, by requests at once; a point can be chosen. @param {any} h @param {any} d @param {any} act @param {number} width */
function choice(h, d, act, width) {
  const height = width < 520 ? 250 : 290, left = 50, right = width - 16, top = 30, bottom = height - 40;
  const each = d.points.map((/** @type {any} */ one) => one.each), all = d.points.map((/** @type {any} */ one) => one.all);
  const x = linear([0, Math.max(...each) * 1.08], [left, right]), y = log([Math.min(...all) / 1.6, Math.max(...all) * 1.7], [bottom, top]);
  const path = d.points.map((/** @type {any} */ one) => `${x(one.each)},${y(one.all)}`).join(" ");
  const told = (/** @type {any} */ one) => `${one.requests}: ${number(one.each)} each, ${number(one.all)} in all${one.dollars === null || width < 520 ? "" : `, $${number(one.dollars)} a million`}`;
  let last = -100;
  const shown = new Set([...d.points].reverse().filter((/** @type {any} */ one) => { const isApart = x(one.each) - last > 30; if (isApart) last = x(one.each); return isApart; }));
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Tokens a second of all against tokens a second of each, by requests at once">
    <text class="muted" x="0" y="14">${width < 520 ? "tokens a second of all, by requests" : "tokens a second of all together; the numbers are requests at once"}</text>
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(6), label: "tokens a second that each sees", end: right })}
    ${axisY({ scale: y, x: left, right, ticks: ticks(y, all), format: (v) => v.toLocaleString("en-US") })}
    <polyline points=${path} fill="none" stroke="var(--accent)" stroke-width="2" />
    ${d.points.map((/** @type {any} */ one) => { const isNow = one.requests === d.requests, px = x(one.each), py = y(one.all);
      return h`<g key=${one.requests} class="handle" onClick=${() => act({ requests: one.requests })}>
        <circle cx=${px} cy=${py} r="14" fill="transparent" />
        <circle cx=${px} cy=${py} r=${isNow ? 8 : 4.5} fill=${isNow ? "var(--accent)" : "var(--panel)"} stroke="var(--accent)" stroke-width="2"><title>${one.requests} at once: ${number(one.each)} tok/s each, ${number(one.all)} in all${one.dollars === null ? "" : `, $${number(one.dollars)} a million`}</title></circle>
        ${isNow && h`<text class="halo strong" x=${px + 11} y=${py - 9} fill="var(--accent)">${one.requests}</text>`}
        ${isNow ? h`<text class="halo strong" x=${right} y=${top + 6} text-anchor="end">${told(one)}</text>`
          : shown.has(one) && h`<text class="halo muted" x=${px + 9} y=${py - 8}>${one.requests}</text>`}
      </g>`; })}
  </svg>`;
}

/** 1, 2 and 5 of each power of ten. @param {any} y @param {number[]} values */
function ticks(y, values) {
  const low = Math.min(...values) / 1.6, high = Math.max(...values) * 1.7, found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    for (const m of [1, 2, 5]) if (m * power >= low && m * power <= high) found.push(m * power);
  return found;
}

/** @param {any} h @param {any} d @param {number} width */
function ways(h, d, width) {
  return h`<svg viewBox="0 0 ${width} ${34 + d.ways.length * 24}" role="img" aria-label="What would fit">
    <text class="strong" x="0" y="22">What would fit</text>
    ${d.ways.map((/** @type {string} */ text, /** @type {number} */ i) => h`<g key=${text}><circle cx="5" cy=${42 + i * 24} r="4" fill="var(--compute)" /><text x="18" y=${46 + i * 24}>${text}</text></g>`)}
  </svg>`;
}
