// What does a token cost at each speed that a person sees, and beside an API's price?
import { apart, axisX, axisY, linear, log } from "lab/svg.js";
import { number } from "lab/format.js";

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  return h`<div>${frontier(h, d, inputs, act, width)}${bars(h, d, width)}</div>`;
}

const dollars = (/** @type {number} */ value) => `$${number(value)}`;

/** @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width */
function frontier(h, d, inputs, act, width) {
  const isNarrow = width < 560, height = Math.round(Math.max(270, Math.min(420, width * 0.46)));
  const left = 50, right = width - 14, top = 22, bottom = height - 42;
  const speeds = d.points.map((/** @type {any} */ one) => one.tokens_per_s_per_user);
  const costs = d.points.flatMap((/** @type {any} */ one) => [one.low, one.high]).concat([d.own, d.api].filter((v) => v > 0));
  const x = linear([0, Math.max(...speeds) * 1.08], [left, right]);
  const y = log([Math.min(...costs) / 1.4, Math.max(...costs) * 1.3], [bottom, top]);
  const along = (/** @type {string} */ name) => d.points.map((/** @type {any} */ one) => `${x(one.tokens_per_s_per_user)},${y(one[name])}`);
  const hasBand = d.chosen.low < d.chosen.high;
  const cx = x(d.chosen.tokens_per_s_per_user), cy = y(d.chosen.mid);
  const drag = (/** @type {PointerEvent} */ event) => {
    const svg = /** @type {SVGElement} */ (event.currentTarget).closest("svg");
    if (!event.buttons || !svg) return;
    /** @type {Element} */ (event.currentTarget).setPointerCapture(event.pointerId);
    const box = svg.getBoundingClientRect(), px = ((event.clientX - box.x) / box.width) * width;
    const off = (/** @type {any} */ one) => Math.abs(x(one.tokens_per_s_per_user) - px);
    act({ batch: d.points.reduce((/** @type {any} */ a, /** @type {any} */ b) => (off(b) < off(a) ? b : a)).batch });
  };
  const marks = d.points.filter((/** @type {any} */ one, /** @type {number} */ i) => one.batch !== d.chosen.batch && (!isNarrow || i % 2 === 0));
  const side = isNarrow ? left + 4 : right;
  const lines = apart([
    ...(d.api > 0 ? [{ x: side, y: y(d.api) - 5, text: `API ${dollars(d.api)}`, colour: "communication" }] : []),
    { x: side, y: y(d.own) - 5, text: `${isNarrow ? "owned" : "this batch on a device of your own"} ${dollars(d.own)}`, colour: "compute" },
  ]);
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-labelledby="cost-title cost-desc">
    <title id="cost-title">Dollars per million tokens over the speed that each person sees</title>
    <desc id="cost-desc">With ${d.chosen.batch} requests at once each sees ${number(d.chosen.tokens_per_s_per_user)} tokens a second at ${dollars(d.chosen.mid)} a million tokens of all kinds; the API takes ${dollars(d.api)}.</desc>
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(isNarrow ? 4 : 8), label: "tokens/s that each person sees", end: right })}
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(5), format: dollars })}
    <text class="muted" x=${isNarrow ? 0 : left + 6} y=${top - 8}>$ per million tokens, read and written</text>
    ${hasBand && h`<polygon points=${[...along("high"), ...along("low").reverse()].join(" ")} fill="var(--accent)" fill-opacity=".13" />`}
    <polyline points=${along("mid").join(" ")} fill="none" stroke="var(--accent)" stroke-width="2.5" stroke-linejoin="round" />
    ${d.api > 0 && h`<line x1=${left} x2=${right} y1=${y(d.api)} y2=${y(d.api)} stroke="var(--communication)" stroke-width="2" stroke-dasharray="6 4" />`}
    <line x1=${left} x2=${right} y1=${y(d.own)} y2=${y(d.own)} stroke="var(--compute)" stroke-width="1.5" stroke-dasharray="2 4" />
    ${lines.map((one) => h`<text key=${one.colour} class="halo" x=${one.x} y=${one.y} text-anchor=${isNarrow ? "start" : "end"} fill="var(--${one.colour})">${one.text}</text>`)}
    ${marks.map((/** @type {any} */ one) => h`<g key=${one.batch}>
      <circle cx=${x(one.tokens_per_s_per_user)} cy=${y(one.mid)} r="3.5" fill="var(--accent)"><title>${one.batch} at once: ${number(one.tokens_per_s_per_user)} tokens/s each, ${dollars(one.mid)} (${dollars(one.low)} to ${dollars(one.high)})</title></circle>
      <text class="halo muted" x=${x(one.tokens_per_s_per_user) + 6} y=${y(one.mid) - 6}>${one.batch}</text></g>`)}
    ${hasBand && h`<line x1=${cx} x2=${cx} y1=${y(d.chosen.low)} y2=${y(d.chosen.high)} stroke="var(--accent)" stroke-width="1.5" />`}
    <g onPointerMove=${drag} onPointerDown=${drag} class="handle">
      <circle cx=${cx} cy=${cy} r="22" fill="transparent" />
      <circle cx=${cx} cy=${cy} r="9" fill="var(--accent)" fill-opacity=".25" stroke="var(--accent)" stroke-width="2.5" />
    </g>
    <text class="halo strong" x=${isNarrow ? right - 66 : Math.max(left + 70, Math.min(right - 70, cx))} y=${isNarrow ? cy + 28 : cy - 16} text-anchor="middle" fill="var(--accent)">${inputs.batch} at once ${dollars(d.chosen.mid)}</text>
  </svg>`;
}

/** What a million of each kind costs, beside the API. @param {any} h @param {any} d @param {number} width */
function bars(h, d, width) {
  const left = 76, right = width - 16, row = 34, height = 3 * row + 30;
  const x = linear([0, Math.max(...d.bars.flatMap((/** @type {any} */ one) => [one.high, one.api]))], [left, right]);
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label=${d.bars.map((/** @type {any} */ one) => `${one.name}: ${dollars(one.mid)}, API ${dollars(one.api)}`).join("; ")}>
    <text class="muted" x="0" y="14">a million of each${width < 420 ? "" : ": middle price, its band"}, and the <tspan fill="var(--communication)">API's price</tspan></text>
    ${d.bars.map((/** @type {any} */ one, /** @type {number} */ i) => {
      const y = 24 + i * row, middle = y + 11, end = x(one.mid), tail = Math.max(end, x(one.high), x(one.api)) + 8;
      const fits = tail + 90 < right;
      return h`<g key=${one.name}>
        <text x="0" y=${middle + 4}>${one.name}</text>
        <rect x=${left} y=${y} width=${Math.max(1, end - left)} height="22" fill="var(--accent)" fill-opacity=".75" />
        ${one.low < one.high && h`<path d="M${x(one.low)},${middle} H${x(one.high)} M${x(one.low)},${middle - 5} v10 M${x(one.high)},${middle - 5} v10" stroke="var(--text)" fill="none" stroke-opacity=".65" />`}
        <line x1=${x(one.api)} x2=${x(one.api)} y1=${y - 2} y2=${y + 24} stroke="var(--communication)" stroke-width="3" />
        <text class="halo strong" x=${fits ? tail : right} y=${fits ? middle + 4 : y - 2} text-anchor=${fits ? "start" : "end"}>${dollars(one.mid)}</text></g>`;
    })}
  </svg>`;
}
