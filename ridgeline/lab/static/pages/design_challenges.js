// Is each line of the sheet kept, what does the fleet hold, and how do answers come over time?
import { axisX, axisY, linear, log } from "lab/svg.js";
import { number, scaled, seconds } from "lab/format.js";

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  return h`<div>
    ${sheet(h, d, inputs, width)}
    ${fleet(h, d, inputs, act, width)}
    ${d.dots.length > 0 && dots(h, d, width)}
  </div>`;
}

/** Had over allowed, on one scale with the limit at one line. @param {any} h @param {any} d @param {any} inputs @param {number} width */
function sheet(h, d, inputs, width) {
  const isNarrow = width < 640, row = isNarrow ? 62 : 36, top = isNarrow ? 106 : 78, left = isNarrow ? 4 : 150, right = width - (isNarrow ? 4 : 220);
  const shares = d.checks.map((/** @type {any} */ one) => one.share);
  const x = log([Math.min(0.15, ...shares) / 1.2, Math.max(3, ...shares) * 1.15], [left, right]), high = top + d.checks.length * row + 4;
  const word = d.is_met ? "MET" : "NOT MET", fill = d.is_met ? "var(--compute)" : "var(--bad)";
  return h`<svg viewBox="0 0 ${width} ${high}" role="img" aria-labelledby="dc-title dc-desc">
    <title id="dc-title">The sheet: ${inputs.challenge}</title>
    <desc id="dc-desc">${word}. ${d.checks.map((/** @type {any} */ one) => `${one.name}: ${one.had}, ${one.limit}: ${one.is_met ? "kept" : "not kept"}`).join(". ")}</desc>
    <text class="strong" x="4" y="18" font-size="15">${inputs.challenge}</text>
    ${isNarrow ? lines(d.text, Math.floor(width / 6.3)).map((text, i) => h`<text key=${i} class="muted" x="4" y=${36 + i * 15}>${text}</text>`) : h`<text class="muted" x="4" y="37">${d.text}</text>`}
    <g><rect x=${width - (d.is_met ? 62 : 100)} y=${isNarrow ? 62 : 4} width=${d.is_met ? 60 : 98} height="25" rx="12" fill="none" stroke=${fill} stroke-width="2" /><text class="strong" x=${width - (d.is_met ? 32 : 51)} y=${isNarrow ? 79 : 21} text-anchor="middle" fill=${fill} font-size="13">${word}</text></g>
    ${!isNarrow && d.binding && h`<text x=${width - 4} y="47" text-anchor="end" fill="var(--bad)">in the way: ${d.binding}</text>`}
    <line x1=${x(1)} x2=${x(1)} y1=${top - 6} y2=${high - 4} stroke="var(--text)" stroke-width="1.5" />
    <text class="halo" x=${x(1)} y=${top - 10} text-anchor="middle">limit</text>
    ${d.checks.map((/** @type {any} */ one, /** @type {number} */ i) => {
      const y = top + i * row + (isNarrow ? 18 : 4), end = x(one.share), colour = one.is_met ? "var(--compute)" : "var(--bad)";
      return h`<g key=${one.name}>
        <text x="4" y=${isNarrow ? y - 5 : y + 15}>${one.name}</text>
        <rect x=${left} y=${y} width=${Math.max(2, Math.min(end, x(1)) - left)} height="20" rx="3" fill=${colour} fill-opacity=".75" />
        ${end > x(1) && h`<rect x=${x(1)} y=${y} width=${end - x(1)} height="20" rx="3" fill="var(--bad)" fill-opacity=".35" stroke="var(--bad)" />`}
        <text class=${isNarrow ? "halo muted" : ""} x=${width - 4} y=${isNarrow ? y + 35 : y + 15} text-anchor="end">${one.had} / ${one.limit}</text>
        ${one.is_met && end - left > 70 ? h`<text class="strong" x=${end - 7} y=${y + 15} text-anchor="end" fill="var(--on-accent)">${percent(one.share)}</text>`
          : h`<text class="halo strong" x=${end > right - 60 ? end - 6 : end + 6} y=${y + 15} text-anchor=${end > right - 60 ? "end" : "start"} fill=${colour}>${percent(one.share)}</text>`}
      </g>`;
    })}
  </svg>`;
}

/** @param {number} share */
const percent = (share) => (share >= 9.95 ? `${number(share)}×` : `${number(100 * share)} %`);

/** @param {string} text @param {number} most */
function lines(text, most) {
  const found = [""];
  for (const word of text.split(" ")) {
    const last = found.length - 1;
    if (found[last] && found[last].length + word.length >= most) found.push(word);
    else found[last] += (found[last] ? " " : "") + word;
  }
  return found;
}

const HOLDS = [["weights", "weights"], ["activations", "working space"], ["kv", "KV cache"]];

/** Replicas as boxes of devices, each filled as its memory is. @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width */
function fleet(h, d, inputs, act, width) {
  const shown = Math.min(d.replicas, 32), total = d.parts.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.bytes, 0);
  const whole = Math.max(d.capacity_bytes, total), isOver = total > d.capacity_bytes;
  const size = shown * d.tp > 64 ? 13 : shown * d.tp > 24 ? 18 : 26, tall = size * 1.9, inner = Math.min(d.tp, 8) * (size + 3) + 7, boxHigh = tall + 10;
  const across = Math.max(1, Math.floor((width - 4) / (inner + 8))), rows = Math.ceil(shown / across), top = 30;
  const sums = HOLDS.map(([kind, name]) => ({ kind, name, bytes: d.parts.filter((/** @type {any} */ one) => one.holds === kind).reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.bytes, 0) }));
  const high = top + rows * (boxHigh + 7) + 22;
  const device = (/** @type {number} */ x, /** @type {number} */ y, /** @type {string} */ key) => {
    let from = y + tall;
    return h`<g key=${key}><rect x=${x} y=${y} width=${size} height=${tall} rx="2" fill="var(--free)" />
      ${sums.map((one) => { const part = (tall * one.bytes) / whole; from -= part; return part > 0.3 && h`<rect key=${one.kind} x=${x} y=${from} width=${size} height=${part} fill=${`var(--${one.kind})`} fill-opacity=".9" />`; })}
      ${isOver && h`<line x1=${x - 1} x2=${x + size + 1} y1=${y + tall - (tall * d.capacity_bytes) / whole} y2=${y + tall - (tall * d.capacity_bytes) / whole} stroke="var(--bad)" stroke-width="2" />`}</g>`;
  };
  return h`<svg viewBox="0 0 ${width} ${high}" role="img" aria-label=${`${d.replicas} replicas of ${d.tp} ${d.device}. Of each device's ${scaled(d.capacity_bytes, "B")}: ${sums.map((one) => `${one.name} ${scaled(one.bytes, "B")}`).join(", ")}`}>
    <text class="strong" x="4" y="16" font-size="13">${d.replicas} × ${d.tp} ${d.device}</text>
    ${width > 560 && h`<text class="muted" x=${width - 4} y="16" text-anchor="end">${isOver ? "it does not fit: the line is the device's memory" : `each bar is the memory of one device, ${scaled(d.capacity_bytes, "B")}`}</text>`}
    ${Array.from({ length: shown }, (_, n) => {
      const x = 4 + (n % across) * (inner + 8), y = top + Math.floor(n / across) * (boxHigh + 7);
      return h`<g key=${n} class="handle" onClick=${() => act({ replicas: n + 1 })}><title>replica ${n + 1}: click to have so many</title>
        <rect x=${x} y=${y} width=${inner} height=${boxHigh} rx="5" fill="transparent" stroke="var(--line)" stroke-width="1.5" />
        ${Array.from({ length: d.tp }, (_, k) => device(x + 5 + k * (size + 3), y + 5, `${k}`))}</g>`;
    })}
    ${sums.map((one, i) => { const x = 4 + i * Math.min(190, (width - 8) / 3); return h`<g key=${one.kind}><rect x=${x} y=${high - 17} width="11" height="11" rx="2" fill=${`var(--${one.kind})`} /><text class="muted" x=${x + 15} y=${high - 7}>${width > 560 ? `${one.name} ${scaled(one.bytes, "B")}` : one.name.split(" ")[0]}</text></g>`; })}
    ${d.replicas > shown && h`<text class="muted" x=${width - 4} y=${high - 7} text-anchor="end">and ${d.replicas - shown} more replicas</text>`}
  </svg>`;
}

/** A dot for each answer: it rises where the queue grows. @param {any} h @param {any} d @param {number} width */
function dots(h, d, width) {
  const left = 44, right = width - 10, top = 30, bottom = 190, end = Math.max(...d.dots.map((/** @type {number[]} */ one) => one[0]));
  const most = Math.max(d.limit_s, ...d.dots.map((/** @type {number[]} */ one) => one[1])) * 1.08;
  const x = linear([0, end], [left, right]), y = linear([0, most], [bottom, top]);
  return h`<svg viewBox="0 0 ${width} ${bottom + 38}" role="img" aria-label=${`Times to the whole answer of ${d.dots.length} requests by their arrival, up to ${seconds(most / 1.08)}`}>
    <text class="strong" x="4" y="14" font-size="13">${width > 500 ? "time to the whole answer, request by request" : "time to the whole answer"}${d.num_run < d.replicas ? ` (${d.num_run} replicas)` : ""}</text>
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(4), format: (v) => (v ? seconds(v) : "0") })}
    ${axisX({ scale: x, y: bottom, top: bottom, ticks: x.ticks(width < 500 ? 4 : 8), format: (v) => (v ? seconds(v) : "0"), label: "arrival", end: right })}
    ${d.dots.map((/** @type {number[]} */ [came, took]) => h`<circle key=${`${came}-${took}`} cx=${x(came)} cy=${y(took)} r="2.2" fill=${d.limit_s && took > d.limit_s ? "var(--bad)" : "var(--compute)"} fill-opacity=".7" />`)}
    ${d.limit_s > 0 && h`<line x1=${left} x2=${right} y1=${y(d.limit_s)} y2=${y(d.limit_s)} stroke="var(--text)" stroke-width="1.5" /><text class="halo" x=${left + 4} y=${y(d.limit_s) + (d.alone_s > d.limit_s ? 14 : -5)}>${seconds(d.limit_s)} allowed</text>`}
    ${d.alone_s > 0 && h`<line x1=${left} x2=${right} y1=${y(d.alone_s)} y2=${y(d.alone_s)} stroke="var(--accent)" stroke-width="1.5" stroke-dasharray="5 4" /><text class="halo" x=${right} y=${y(d.alone_s) + (Math.abs(y(d.alone_s) - y(d.limit_s)) < 16 && d.alone_s > d.limit_s ? -5 : 14)} text-anchor="end" fill="var(--accent)">a lone request: ${seconds(d.alone_s)}</text>`}
  </svg>`;
}
