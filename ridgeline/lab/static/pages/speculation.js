// Which drafts of each step are kept, and which number of drafts gains most, for how many requests?
import { axisX, axisY, linear } from "lab/svg.js";
import { number } from "lab/format.js";

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const isNarrow = width < 640, half = isNarrow ? width : Math.floor((width - 22) / 2), d = answer.drawing;
  const high = isNarrow ? 240 : 300;
  return h`<div>
    ${tape(h, d, inputs, act, width)}
    <svg viewBox=${`0 0 ${width} ${isNarrow ? 2 * high + 20 : high}`} role="img" aria-labelledby="sp-title sp-desc">
      <title id="sp-title">Speed-up by the number of drafts, and by the batch</title>
      <desc id="sp-desc">In the simple form ${d.best_simple} drafts are best, with ${number(d.curve[d.best_simple].simple)} times. By the price of steps: ${d.batches.map((/** @type {number} */ batch, /** @type {number} */ i) => `batch ${batch}: ${d.best[i]} drafts, ${number(d.surface[i][d.best[i]])} times`).join("; ")}.</desc>
      ${curves(h, d, inputs, act, half, high)}
      <g transform=${isNarrow ? `translate(0 ${high + 20})` : `translate(${width - half} 0)`}>${surface(h, d, inputs, act, half, high)}</g>
    </svg>
  </div>`;
}

/** The steps as rows: kept drafts, the model's own token, and what was thrown away. A click rejects a kept draft, or takes that back.
 * @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width */
function tape(h, d, inputs, act, width) {
  const before = (/** @type {number} */ step) => inputs.rejected.split(",").filter((/** @type {string} */ one) => one && Number(one.split(":")[0]) < step);
  const button = (/** @type {string} */ label, /** @type {() => void} */ press) => ({
    role: "button", tabindex: 0, "aria-label": label, style: { cursor: "pointer" }, onClick: press,
    onKeyDown: (/** @type {KeyboardEvent} */ e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); press(); } },
  });
  const most = Math.max(1, ...d.steps.map((/** @type {any} */ one) => one.num_drafts)), hasText = d.steps.some((/** @type {any} */ one) => one.tokens.length);
  const left = 4, right = 66, cell = (width - left - right) / (most + 1), tall = 22, gap = 4, top = 40;
  const rows = d.steps.slice(0, width < 640 ? 8 : 12);
  const letters = Math.floor((cell - 8) / 6.4), cut = (/** @type {string} */ text) => (text.length > letters ? `${text.slice(0, Math.max(0, letters - 1))}…` : text);
  const mean = `${number(d.tape_mean)} tokens a step on average`;
  return h`<svg viewBox="0 0 ${width} ${top + rows.length * (tall + gap) + 12}" role="group" aria-label=${`Token tape: ${mean}. ${rows.map((/** @type {any} */ one, /** @type {number} */ i) => `Step ${i + 1}: ${one.num_right} of ${one.num_drafts} drafts kept`).join("; ")}`}>
    <g>${legend(h, width, left)}</g>
    ${width > 760 && h`<text class="muted" x="412" y="14">(click a kept one to reject it)</text>`}
    <text class="strong halo" x=${width - 4} y="14" text-anchor="end" font-size="13">${width < 640 ? `${number(d.tape_mean)} tokens a step` : mean}</text>
    ${rows.map((/** @type {any} */ one, /** @type {number} */ i) => {
      const y = top + i * (tall + gap);
      return h`<g key=${i}>
        ${Array.from({ length: one.num_drafts + 1 }, (_, j) => {
          const isKept = j < one.num_right, isOwn = j === one.num_right, x = left + j * cell;
          const fill = isKept ? "var(--compute)" : isOwn ? "var(--accent)" : "none";
          const word = hasText ? cut((one.tokens[j] ?? "").replaceAll("\n", "⏎")) : "";
          const isRejected = isOwn && one.rejected === j;
          const said = isKept ? "draft, kept; click to reject it" : isRejected ? "you rejected this draft: the model's own token; click to take that back" : isOwn ? (j < one.num_drafts ? "the draft was wrong: the model's own token" : "all drafts kept, and one token more") : "thrown away: it stood behind a wrong one";
          const press = isKept ? button(`step ${i + 1}: reject draft ${j + 1}`, () => act({ rejected: [...before(i), `${i}:${j}`].join(",") }))
            : isRejected ? button(`step ${i + 1}: take back that draft ${j + 1} was rejected`, () => act({ rejected: before(i).join(",") })) : {};
          return h`<g key=${j} ...${press}><title>${said}${hasText && one.tokens[j] ? `: ${one.tokens[j]}` : ""}</title>
            <rect x=${x + 1} y=${y} width=${cell - 2} height=${tall} rx="4" fill=${fill} stroke=${isRejected ? "var(--text)" : isKept || isOwn ? "none" : j === one.num_drafts ? "none" : "var(--waiting)"} stroke-width=${isRejected ? 2 : 1} stroke-dasharray=${isRejected ? "none" : "3 3"} />
            ${word && (isKept || isOwn) && h`<text fill="var(--on-accent)" x=${x + cell / 2} y=${y + 15} text-anchor="middle" font-size="11.5">${word}</text>`}
            ${!hasText && (isKept || (isOwn && j < one.num_drafts)) && cell > 15 && h`<text fill="var(--on-accent)" x=${x + cell / 2} y=${y + 15.5} text-anchor="middle">${isKept ? "✓" : "✗"}</text>`}
            ${!hasText && isOwn && j === one.num_drafts && cell > 15 && h`<text fill="var(--on-accent)" x=${x + cell / 2} y=${y + 15.5} text-anchor="middle">+1</text>`}
            ${!isKept && !isOwn && j < one.num_drafts && cell > 15 && h`<text fill="var(--waiting)" x=${x + cell / 2} y=${y + 15.5} text-anchor="middle">·</text>`}</g>`;
        })}
        <text class="muted" x=${width - 4} y=${y + 15} text-anchor="end">${one.num_right + 1} ${one.num_right ? "tokens" : "token"}</text></g>`;
    })}
  </svg>`;
}

/** @param {any} h @param {number} width @param {number} x */
function legend(h, width, x) {
  const items = [["var(--compute)", "draft, kept", 92], ["var(--accent)", width < 640 ? "own" : "the model's own token", width < 640 ? 50 : 166], ["none", width < 640 ? "lost" : "draft, thrown away", 0]];
  let at = x;
  return items.map(([fill, name, wide]) => {
    const from = at;
    at += Number(wide);
    const y = width < 640 ? 18 : 3;
    return h`<g key=${name}><rect x=${from + 1} y=${y + 1} width="12" height="12" rx="3" fill=${fill} stroke=${fill === "none" ? "var(--waiting)" : "none"} stroke-dasharray="2 2" /><text class="muted" x=${from + 18} y=${y + 11}>${name}</text></g>`;
  });
}

/** Both forms by k; the handle chooses it. @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width @param {number} high */
function curves(h, d, inputs, act, width, high) {
  const left = 34, right = width - 8, top = 34, bottom = high - 42, last = d.curve.length - 1;
  const most = Math.max(1.2, ...d.curve.map((/** @type {any} */ one) => Math.max(one.simple, one.priced))) * 1.12;
  const x = linear([0, last], [left, right]), y = linear([0, most], [bottom, top]);
  const line = (/** @type {string} */ name) => d.curve.map((/** @type {any} */ one) => `${x(one.num_drafts)},${y(one[name])}`).join(" ");
  const best = d.curve.reduce((/** @type {any} */ a, /** @type {any} */ b) => (b.priced > a.priced ? b : a)), simple = d.curve[d.best_simple];
  const pick = (/** @type {PointerEvent} */ event) => {
    const svg = /** @type {SVGElement} */ (event.currentTarget).closest("svg");
    if (!svg || (event.type === "pointermove" && !event.buttons)) return;
    const box = svg.getBoundingClientRect(), view = Number(svg.getAttribute("viewBox")?.split(" ")[2]);
    const k = Math.round(x.invert(((event.clientX - box.x) / box.width) * view));
    act({ num_drafts: Math.max(1, Math.min(last, k)) });
  };
  const k = inputs.num_drafts, mark = (/** @type {any} */ one, /** @type {string} */ name, /** @type {string} */ fill, /** @type {number} */ shift) => h`<g>
    <circle cx=${x(one.num_drafts)} cy=${y(one[name])} r="5.5" fill=${fill} stroke="var(--panel)" stroke-width="1.5" />
    <text class="halo strong" x=${Math.min(x(one.num_drafts), right - 44)} y=${y(one[name]) + shift} text-anchor="middle" fill=${fill}>k = ${one.num_drafts}: ${number(one[name])}×</text></g>`;
  return h`<g onPointerDown=${pick} onPointerMove=${pick} class="handle">
    <rect x="0" y="0" width=${width} height=${high - 16} fill="transparent" />
    <text class="strong" x="4" y="14" font-size="13">speed-up by k</text>
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(4), format: (v) => `${v}×` })}
    ${axisX({ scale: x, y: bottom, top: bottom, ticks: [0, 4, 8, 12, 16], label: "drafts in a step, k", end: right })}
    <line x1=${left} x2=${right} y1=${y(1)} y2=${y(1)} stroke="var(--muted)" stroke-dasharray="4 4" />
    <line x1=${x(k)} x2=${x(k)} y1=${top} y2=${bottom} stroke="var(--accent)" stroke-width="2" />
    <circle cx=${x(k)} cy=${bottom} r="7" fill="var(--accent)" stroke="var(--panel)" stroke-width="1.5" />
    <polyline points=${line("simple")} fill="none" stroke="var(--muted)" stroke-width="2" stroke-dasharray="6 4" />
    <polyline points=${line("priced")} fill="none" stroke="var(--compute)" stroke-width="2.5" />
    ${best.num_drafts > 0 && mark(best, "priced", "var(--compute)", best.priced > simple.simple ? -12 : 22)}
    ${simple.num_drafts > 0 && mark(simple, "simple", "var(--muted)", simple.simple >= best.priced ? -12 : 22)}
    <text class="halo" x=${right} y=${y(d.curve[last].simple) + (d.curve[last].simple > d.curve[last].priced ? -8 : 16)} text-anchor="end" fill="var(--muted)">simple form</text>
    <text class="halo" x=${right} y=${y(d.curve[last].priced) + (d.curve[last].simple > d.curve[last].priced ? 16 : -8)} text-anchor="end" fill="var(--compute)">batch ${inputs.batch}</text>
  </g>`;
}

/** Speed-up over k and batch. @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width @param {number} high */
function surface(h, d, inputs, act, width, high) {
  const left = 36, top = 34, bottom = high - 42, columns = d.curve.length - 1, wide = (width - left - 4) / columns;
  const tall = (bottom - top) / d.batches.length, most = Math.max(1.05, ...d.surface.flat());
  const shade = (/** @type {number} */ v) => (v >= 1 ? (v - 1) / (most - 1) : Math.min(1, (1 - v) * 1.2));
  return h`<g>
    <text class="strong" x="0" y="14" font-size="13">by batch: where it pays</text>
    ${d.batches.map((/** @type {number} */ batch, /** @type {number} */ i) => h`<g key=${batch}>
      <text class="muted" x=${left - 6} y=${top + i * tall + tall / 2 + 4} text-anchor="end">${batch}</text>
      ${d.surface[i].slice(1).map((/** @type {number} */ v, /** @type {number} */ j) => {
        const k = j + 1, isBest = d.best[i] === k, isChosen = k === inputs.num_drafts && near(d.batches, inputs.batch) === batch, opacity = 0.06 + 0.94 * shade(v);
        return h`<g key=${k} onClick=${() => act({ num_drafts: k, batch })} class="handle"><title>batch ${batch}, ${k} drafts: ${number(v)} times</title>
          <rect x=${left + j * wide + 0.5} y=${top + i * tall + 0.5} width=${wide - 1} height=${tall - 1} rx="2" fill=${v >= 1 ? "var(--compute)" : "var(--waiting)"} fill-opacity=${opacity} stroke=${isChosen ? "var(--accent)" : "none"} stroke-width="3" />
          ${isBest && (wide > 21 ? h`<text x=${left + (j + 0.5) * wide} y=${top + i * tall + tall / 2 + 4} text-anchor="middle" font-size="10.5" font-weight="650" fill=${opacity > 0.55 ? "var(--on-accent)" : "var(--text)"}>${v.toFixed(v >= 9.95 ? 0 : wide > 26 ? 2 : 1)}</text>`
            : h`<circle cx=${left + (j + 0.5) * wide} cy=${top + (i + 0.5) * tall} r="3" fill=${opacity > 0.55 ? "var(--on-accent)" : "var(--text)"} />`)}
        </g>`;
      })}</g>`)}
    <polyline points=${d.best.map((/** @type {number} */ k, /** @type {number} */ i) => [k, i]).filter((/** @type {number[]} */ [k]) => k > 0).map((/** @type {number[]} */ [k, i]) => `${left + (k - 0.5) * wide},${top + (i + 0.5) * tall - tall / 2 + 1} ${left + (k - 0.5) * wide},${top + (i + 0.5) * tall + tall / 2 - 1}`).join(" ")} fill="none" stroke="var(--text)" stroke-opacity=".28" stroke-width="1.5" />
    ${[1, 4, 8, 12, 16].map((k) => h`<text key=${k} class="muted" x=${left + (k - 0.5) * wide} y=${bottom + 16} text-anchor="middle">${k}</text>`)}
    <text class="muted" x=${width - 4} y=${bottom + 33} text-anchor="end">drafts in a step, k</text>
    <text class="muted" x="0" y=${top - 6}>requests</text>
    <text class="muted" x=${width - 4} y=${top - 6} text-anchor="end">green: faster, grey: slower</text>
  </g>`;
}

/** The row nearest to a batch. @param {number[]} batches @param {number} batch */
const near = (batches, batch) => batches.reduce((a, b) => (Math.abs(Math.log(b / batch)) < Math.abs(Math.log(a / batch)) ? b : a));
