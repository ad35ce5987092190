// Who holds what, who works when, and who waits for whom?
import { apart, axisX, axisY, linear, log } from "lab/svg.js";
import { number, scaled, seconds } from "lab/format.js";

const LEFT = 62;

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  return h`<div>${devices(h, d, inputs, act, width)}${shards(h, d, width)}${layer(h, d, width)}${steps(h, d, inputs, width)}${ways(h, d, inputs, act, width)}</div>`;
}

/** Each device with its memory; a click shows its share. @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width */
function devices(h, d, inputs, act, width) {
  const gap = width < 560 ? 4 : 8, box = Math.min(110, (width - LEFT - gap * (d.tp - 1)) / d.tp), tall = d.pp > 2 ? 26 : 46, row = tall + 30;
  const parts = [["weights", d.memory.weights], ["kv", d.memory.kv], ["activations", d.memory.other]];
  const used = parts.reduce((sum, one) => sum + one[1], 0), isOver = used > d.capacity;
  const whole = Math.max(used, d.capacity);
  const stages = Math.min(d.pp, 4);
  return h`<svg viewBox="0 0 ${width} ${stages * row + 22}" role="group" aria-label=${`${d.tp * d.pp} devices, each with ${scaled(d.memory.weights, "B")} of weights and ${scaled(d.memory.kv, "B")} of cache; ${scaled(Math.max(0, d.capacity - used), "B")} free`}>
    ${Array.from({ length: stages }, (_, s) => h`<g key=${s}>
      <text x="0" y=${s * row + tall / 2 + 2}>${d.pp > 1 ? `stage ${s + 1}` : inputs.replicas > 1 ? `1 of ${inputs.replicas}` : "devices"}</text>
      <text class="muted" x="0" y=${s * row + tall / 2 + 17}>${d.stage_layers[s]} layers</text>
      ${Array.from({ length: d.tp }, (_, r) => {
        const gpu = s * d.tp + r, x = LEFT + r * (box + gap), isOwn = gpu === d.gpu;
        let y = s * row + 4 + tall;
        return h`<g key=${r} role="button" tabindex="0" aria-pressed=${isOwn} aria-label=${`device ${gpu}`} style="cursor:pointer"
            onClick=${() => act({ gpu })} onKeyDown=${(/** @type {KeyboardEvent} */ e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act({ gpu }); } }}>
          <rect x=${x} y=${s * row + 4} width=${box} height=${tall} fill="var(--free)" />
          ${parts.map(([name, size]) => { const tallness = (tall * size) / whole; y -= tallness; return h`<rect key=${name} x=${x} y=${y} width=${box} height=${tallness} fill="var(--${name})" />`; })}
          <rect x=${x} y=${s * row + 4} width=${box} height=${tall} fill="none" stroke=${isOwn ? "var(--accent)" : isOver ? "var(--bad)" : "var(--line)"} stroke-width=${isOwn ? 3 : 1} />
          <text x=${x + box / 2} y=${s * row + tall + 19} text-anchor="middle" class=${isOwn ? "strong" : "muted"}>${gpu}</text>
        </g>`;
      })}</g>`)}
    <text x="0" y=${stages * row + 14} fill=${isOver ? "var(--bad)" : "var(--text)"}>
      <tspan fill="var(--weights)">■ weights ${scaled(d.memory.weights, "B")}</tspan>
      <tspan dx="8" fill="var(--kv)">■ KV ${scaled(d.memory.kv, "B")}</tspan>
      ${width > 480 && h`<tspan dx="8" fill="var(--activations)">■ other ${scaled(d.memory.other, "B")}</tspan>`}
      <tspan dx="8">${isOver ? `too much${width > 400 ? ` for ${scaled(d.capacity, "B")}` : ""}` : width > 400 ? `of ${scaled(d.capacity, "B")} each` : ""}</tspan>
    </text>
  </svg>`;
}

/** The matrices of a layer, with the share of one device. @param {any} h @param {any} d @param {number} width */
function shards(h, d, width) {
  const shown = d.matrices.filter((/** @type {any} */ one) => one.rows > 1);
  const most = Math.max(...shown.flatMap((/** @type {any} */ one) => [one.rows, one.columns]));
  const columns = Math.min(shown.length, Math.max(3, Math.floor(width / 88))), cell = width / columns, side = Math.min(92, cell - 16);
  const size = (/** @type {number} */ n) => Math.max(5, side * Math.sqrt(n / most));
  const lines = Array.from({ length: Math.ceil(shown.length / columns) }, (_, k) => shown.slice(k * columns, (k + 1) * columns));
  const tops = [24];
  for (const line of lines) tops.push(tops[tops.length - 1] + 36 + Math.max(...line.map((/** @type {any} */ one) => size(one.rows) + (one.copies > 1 ? 10 : 0))));
  return h`<svg viewBox="0 0 ${width} ${tops[lines.length] + 8}" role="img" aria-label=${`Share of device ${d.gpu} of each matrix of a layer`}>
    <text class="muted" x="0" y="14">one layer: what <tspan fill="var(--accent)" class="strong">device ${d.gpu}</tspan> holds of each matrix${width > 560 ? " (sides drawn by their roots)" : ""}</text>
    ${shown.map((/** @type {any} */ one, /** @type {number} */ i) => {
      const w = size(one.columns), t = size(one.rows), x = (i % columns) * cell + 2, y = tops[Math.floor(i / columns)];
      const isRows = one.split === "rows", n = one.split ? one.shares : 1;
      const cuts = Array.from({ length: n - 1 }, (_, k) => (k + 1) / n);
      const note = one.copies > 1 ? (one.own === one.copies ? `all, / ${n}` : `${one.own} of ${one.copies}${cell > 90 ? " experts" : ""}`) : one.split === "" || n === 1 ? "whole" : `${isRows ? "rows" : "columns"} / ${n}`;
      const own = isRows ? [x, y + t * one.first, w, t * (one.last - one.first)] : one.split ? [x + w * one.first, y, w * (one.last - one.first), t] : [x, y, w, t];
      return h`<g key=${one.role}>
        <title>${one.role}: ${one.rows} x ${one.columns}${one.copies > 1 ? ` x ${one.copies}` : ""}, here ${scaled(one.own_bytes, "B")}</title>
        <rect x=${x} y=${y} width=${w} height=${t} fill="var(--free)" />
        <rect x=${own[0]} y=${own[1]} width=${own[2]} height=${own[3]} fill="var(--weights)" />
        ${cuts.map((c) => (isRows ? h`<line key=${c} x1=${x} x2=${x + w} y1=${y + t * c} y2=${y + t * c} stroke="var(--panel)" />` : h`<line key=${c} x1=${x + w * c} x2=${x + w * c} y1=${y} y2=${y + t} stroke="var(--panel)" />`))}
        ${one.copies > 1 && experts(h, one, x, y + t + 4, side)}
        <text x=${x} y=${y + t + (one.copies > 1 ? 24 : 14)}>${one.role}</text>
        <text class="muted" x=${x} y=${y + t + (one.copies > 1 ? 37 : 27)}>${note}</text>
      </g>`;
    })}
  </svg>`;
}

/** All experts as a line of dots, with those of this device. @param {any} h @param {any} one @param {number} x @param {number} y @param {number} side */
function experts(h, one, x, y, side) {
  const n = one.copies, w = side / n;
  return Array.from({ length: n }, (_, k) => h`<rect key=${k} x=${x + k * w} y=${y} width=${Math.max(0.4, w - (n > 40 ? 0.1 : 1))} height="6" fill=${k >= one.expert && k < one.expert + one.own ? "var(--weights)" : "var(--free)"} />`);
}

/** One layer on one device, operator after operator. @param {any} h @param {any} d @param {number} width */
function layer(h, d, width) {
  const total = d.layer.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.seconds, 0);
  const x = linear([0, total], [0, width]);
  let at = 0;
  const pieces = d.layer.map((/** @type {any} */ one) => { const piece = { ...one, from: at }; at += one.seconds; return piece; });
  return h`<svg viewBox="0 0 ${width} 70" role="img" aria-label=${`One layer takes ${seconds(total)}: ${d.layer.map((/** @type {any} */ one) => `${one.name} ${seconds(one.seconds)}`).join(", ")}`}>
    <text class="muted" x="0" y="16">time of one layer on each device: ${seconds(total)}${d.link && width > 460 ? h`, <tspan fill="var(--communication)">messages over ${d.link}</tspan>` : ""}</text>
    ${pieces.map((/** @type {any} */ one, /** @type {number} */ i) => { const w = x(one.seconds); return h`<g key=${i}>
      <rect x=${x(one.from)} y="24" width=${Math.max(0.6, w - 0.8)} height="28" fill="var(--${one.kind})"><title>${one.name}: ${seconds(one.seconds)}, bound by ${one.bound}</title></rect>
      ${w > one.name.length * 6.2 + 8 && h`<text class="on" x=${x(one.from) + 5} y="42">${one.name.replaceAll("_", " ")}</text>`}</g>`; })}
  </svg>`;
}

/** All stages over the time of a step. @param {any} h @param {any} d @param {any} inputs @param {number} width */
function steps(h, d, inputs, width) {
  const row = 30, top = 24, bottom = top + d.pp * row, right = width - 6;
  const scale = d.step_s >= 1 ? 1 : 1e3, unit = d.step_s >= 1 ? "s" : "ms";
  const x = linear([0, d.step_s * scale], [LEFT, right]);
  return h`<svg viewBox="0 0 ${width} ${bottom + 40}" role="img" aria-label=${`The step takes ${seconds(d.step_s)}; stages wait ${number(100 * d.bubble)} % of it`}>
    <defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="2" height="6" fill="var(--waiting)" fill-opacity=".5" /></pattern></defs>
    <text class="muted" x="0" y="14">one step: <tspan fill="var(--compute)">work</tspan>, <tspan fill="var(--communication)">messages</tspan>${d.pp > 1 ? `, waiting for other stages (${number(100 * d.bubble)} %)` : ""}</text>
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(width < 560 ? 3 : 6), label: `${unit}, ${inputs.micro_batches} micro-batch${inputs.micro_batches > 1 ? "es" : ""}`, end: right })}
    ${Array.from({ length: d.pp }, (_, s) => h`<g key=${s}><text x="0" y=${top + s * row + 19}>${d.pp > 1 ? `stage ${s + 1}` : `all ${d.tp}`}</text>
      <rect x=${LEFT} y=${top + s * row + 4} width=${right - LEFT} height="22" fill="url(#bubble)" /></g>`)}
    ${d.slots.map((/** @type {any} */ one, /** @type {number} */ i) => { const from = x(one.start * scale), y = top + one.stage * row + 4, work = x(one.work * scale) - LEFT, sent = x(one.sent * scale) - LEFT; return h`<g key=${i}>
      <rect x=${from} y=${y} width=${Math.max(0.5, work)} height="22" fill="var(--compute)" />
      <rect x=${from + work} y=${y} width=${Math.max(0, sent)} height="22" fill="var(--communication)" />
      ${d.slots.length < 200 && h`<line x1=${from} x2=${from} y1=${y} y2=${y + 22} stroke="var(--panel)" stroke-width="1.5" />`}
      ${work > 16 && d.pp > 1 && h`<text class="on" x=${from + 5} y=${y + 15}>${one.micro_batch + 1}</text>`}</g>`; })}
  </svg>`;
}

/** Every way to spread a replica: what a person waits for a token, and what a device brings. @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width */
function ways(h, d, inputs, act, width) {
  if (d.ways.length < 2) return null;
  const height = Math.round(Math.max(210, Math.min(270, width * 0.3))), left = 50, right = width - 14, top = 28, bottom = height - 40;
  const times = d.ways.map((/** @type {any} */ one) => one.tpot_s * 1e3), rates = d.ways.map((/** @type {any} */ one) => one.tokens_a_device);
  const x = log([Math.min(...times) / 1.25, Math.max(...times) * 1.6], [left, right]), y = linear([0, Math.max(...rates) * 1.15], [bottom, top]);
  const name = (/** @type {any} */ one) => ["tp", "pp", "ep"].filter((key) => one.layout[key] > 1).map((key) => `${key} ${one.layout[key]}`).join(", ") || "1 device";
  const isOwn = (/** @type {any} */ one) => ["tp", "pp", "ep"].every((key) => one.layout[key] === inputs[key]);
  const choose = (/** @type {any} */ one) => act({ tp: one.layout.tp, pp: one.layout.pp, ep: one.layout.ep, gpu: 0, micro_batches: 1 });
  const isNarrow = width < 560, told = (/** @type {any} */ one) => isOwn(one) || !isNarrow || one.layout.ep === 1;
  const labels = apart(d.ways.map((/** @type {any} */ one) => ({ x: x(one.tpot_s * 1e3), y: y(one.tokens_a_device) + 4, text: name(one) + (one.fits || isNarrow ? "" : " (does not fit)"), one })));
  const isLast = (/** @type {number} */ tx, /** @type {string} */ text) => tx + 12 + text.length * 6.4 > width;
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500].filter((v) => v > x.invert(left) && v < x.invert(right));
  return h`<svg viewBox="0 0 ${width} ${height}" role="group" aria-label="All ways to spread one replica; those in grey do not fit">
    <text class="muted" x="0" y="14">${isNarrow ? "all ways (grey: does not fit): tokens/s a device" : "all ways to spread it: tokens/s that each device brings, over the time of a token"}</text>
    ${axisX({ scale: x, y: bottom, top, ticks: isNarrow ? steps.filter((_, i) => i % 2 === 0) : steps, label: "ms between two tokens of a request", end: right })}
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(4) })}
    ${labels.map((/** @type {any} */ { one, x: tx, y: ty, text }) => { const own = isOwn(one), colour = !one.fits ? "waiting" : own ? "accent" : "compute"; return h`<g key=${text} role="button" tabindex="0" aria-pressed=${own} style="cursor:pointer"
        aria-label=${`${name(one)}: ${number(one.tpot_s * 1e3)} ms a token, ${number(one.tokens_a_device)} tokens/s a device${one.fits ? "" : ", does not fit"}`}
        onClick=${() => choose(one)} onKeyDown=${(/** @type {KeyboardEvent} */ e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(one); } }}>
      <circle cx=${x(one.tpot_s * 1e3)} cy=${y(one.tokens_a_device)} r="14" fill="transparent" />
      <circle cx=${x(one.tpot_s * 1e3)} cy=${y(one.tokens_a_device)} r=${own ? 8 : 5.5} fill=${one.fits ? `var(--${colour})` : "var(--panel)"} stroke=${`var(--${colour})`} stroke-width="2" />
      ${told(one) && h`<text class=${`halo ${own ? "strong" : ""}`} x=${tx + (isLast(tx, text) ? -11 : 11)} y=${ty} text-anchor=${isLast(tx, text) ? "end" : "start"} fill=${`var(--${one.fits ? colour : "muted"})`}>${text}</text>`}</g>`; })}
  </svg>`;
}
