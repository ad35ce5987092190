// Where is the prompt on its way from text to text, and what are the numbers there?
import { linear } from "lab/svg.js";
import { number } from "lab/format.js";
import { Play } from "lab/play.js";

const STEPS = ["1 tokens", "2 embeddings", "3 attention", "4 logits", "5 sampling", "6 text", "7 stop"];
const WORDS = [
  "The tokenizer cuts the text into pieces of its vocabulary. Each has a number; that is all the model sees.",
  "Each number picks a row of a table. Blue is above 0, orange below; the first 48 numbers of each row are shown.",
  "In each layer, each head asks every token which earlier ones it should look at. A row sums to 1.",
  "Behind the last layer, the last token's state is compared with every row of the table: a logit for each token.",
  "Logits become probabilities; temperature, top-k and top-p shape them, and one token is drawn.",
  "The drawn token goes back in at the front, and its bytes become text.",
  "It ends with a stop token, which gives no text, or where the answer is as long as it may be.",
];

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing, now = STEPS.indexOf(inputs.step);
  const views = [tokens, embeddings, attention, logits, sampling, text, stop];
  return h`<div>
    ${way(h, now, act, width)}
    <${Play} at=${now} last="6" ms="2600" go=${(/** @type {number} */ to) => act({ step: STEPS[to] })} />
    <p class="note">${WORDS[now]}</p>
    ${views[now](h, d, width, inputs, act)}
    ${said(h, d, width, act)}
  </div>`;
}

/** The seven steps, each of which can be chosen. @param {any} h @param {number} now @param {any} act @param {number} width */
function way(h, now, act, width) {
  const x = linear([0, 6], [width < 520 ? 18 : 46, width - (width < 520 ? 18 : 46)]);
  return h`<svg viewBox="0 0 ${width} 62" role="img" aria-label="Step ${now + 1} of 7: ${STEPS[now].slice(2)}">
    <path d="M${x(0)},22 L${x(6)},22" stroke="var(--line)" stroke-width="4" /><path d="M${x(0)},22 L${x(now)},22" stroke="var(--accent)" stroke-width="4" />
    <path d="M${x(5)},22 C${x(5)},-8 ${x(1)},-8 ${x(1)},22" stroke="var(--line)" stroke-width="1.5" stroke-dasharray="4 4" fill="none" />
    ${STEPS.map((name, i) => h`<g key=${name} class="handle" onClick=${() => act({ step: name })}>
      <circle cx=${x(i)} cy="22" r="20" fill="transparent" /><circle cx=${x(i)} cy="22" r=${i === now ? 14 : 10} fill=${i <= now ? "var(--accent)" : "var(--panel)"} stroke="var(--accent)" stroke-width="2" />
      <text x=${x(i)} y="26" text-anchor="middle" class=${i <= now ? "on" : "muted"}>${i + 1}</text>
      ${(width >= 520 || i === now) && h`<text x=${Math.max(30, Math.min(width - 34, x(i)))} y="56" text-anchor="middle" class=${i === now ? "strong" : "muted"}>${name.slice(2)}</text>`}</g>`)}
  </svg>`;
}

/** Words in lines. @template T @param {T[]} all @param {(one: T) => string} text @param {number} width @param {number} [least] */
function flow(all, text, width, least = 0) {
  let x = 0, row = 0;
  return all.map((one) => {
    const wide = Math.max(least, text(one).length * 7.4 + 14);
    if (x > 0 && x + wide > width) { x = 0; row += 1; }
    const at = { one, x, row, wide };
    x += wide + 5;
    return at;
  });
}

/** @param {any} h @param {any} d @param {number} width */
function tokens(h, d, width) {
  const placed = flow(d.pieces, (/** @type {any} */ one) => one.text, width, 38), rows = placed[placed.length - 1].row + 1;
  return h`<svg viewBox="0 0 ${width} ${rows * 58}" role="img" aria-label="${d.pieces.length} tokens">
    ${placed.map((p, i) => h`<g key=${i} transform="translate(${p.x} ${p.row * 58})">
      <rect x="0" y="2" width=${p.wide} height="28" rx="5" fill=${p.one.is_special ? "var(--waiting)" : "var(--activations)"} fill-opacity=${p.one.is_special ? 0.5 : [0.85, 0.6][i % 2]} />
      <text class=${p.one.is_special ? "" : "on"} x=${p.wide / 2} y="21" text-anchor="middle">${p.one.text}</text>
      <text class="muted" x=${p.wide / 2} y="46" text-anchor="middle">${p.one.id}</text></g>`)}
  </svg>`;
}

/** @param {any} h @param {any} d @param {number} width */
function embeddings(h, d, width) {
  const left = 84, row = 20, count = Math.min(d.vectors[0].length, width < 520 ? 24 : 48), cell = (width - left) / count;
  const most = Math.max(...d.vectors.flat().map(Math.abs)) || 1;
  return h`<svg viewBox="0 0 ${width} ${d.pieces.length * row + 22}" role="img" aria-label="The first ${count} of ${d.width} numbers of each token's embedding">
    ${d.pieces.map((/** @type {any} */ piece, /** @type {number} */ t) => h`<g key=${t} class="still"><text x=${left - 6} y=${t * row + 15} text-anchor="end">${piece.text}</text>
      ${d.vectors[t].slice(0, count).map((/** @type {number} */ v, /** @type {number} */ i) => h`<rect key=${i} x=${left + i * cell} y=${t * row + 2} width=${cell - 0.8} height=${row - 3} fill=${v >= 0 ? "var(--weights)" : "var(--kv)"} fill-opacity=${Math.max(0.04, Math.sqrt(Math.abs(v) / most))}><title>number ${i + 1} of “${piece.text}”: ${v}</title></rect>`)}</g>`)}
    <text class="muted" x=${width} y=${d.pieces.length * row + 18} text-anchor="end">${count} of ${d.width} numbers</text>
  </svg>`;
}

/** @param {any} h @param {any} d @param {number} width @param {any} inputs @param {any} act */
function attention(h, d, width, inputs, act) {
  const isNarrow = width < 620, n = d.pieces.length, left = 80, head = 74;
  const size = Math.min(isNarrow ? width - left - 4 : width * 0.56 - left, 26 * n, 420), cell = size / n;
  const side = isNarrow ? 0 : left + size + 40, top = isNarrow ? head + size + 26 : 4;
  const pick = 22, rowTop = top + 6 * (pick + 3) + 52, bar = linear([0, 1], [0, (isNarrow ? width : width - side) - left - 46]);
  const rowHeight = d.seen.length > 24 ? 12 : 16, height = Math.max(head + size + 8, rowTop + d.seen.length * rowHeight + 6);
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Attention of layer ${inputs.layer}, head ${inputs.head} over the prompt">
    <g class="still">${d.weights.map((/** @type {number[]} */ row, /** @type {number} */ q) => row.map((w, k) => h`<rect key=${`${q} ${k}`} x=${left + k * cell} y=${head + q * cell} width=${cell - 0.7} height=${cell - 0.7} fill=${k > q ? "var(--free)" : "var(--accent)"} fill-opacity=${k > q ? 0.35 : Math.max(0.04, w)}><title>“${d.pieces[q].text}” looks at “${d.pieces[k].text}”: ${w}</title></rect>`))}</g>
    ${cell > 7 && d.pieces.map((/** @type {any} */ piece, /** @type {number} */ t) => h`<g key=${t}><text x=${left - 5} y=${head + (t + 0.5) * cell + 4} text-anchor="end" class="muted">${cut(piece.text)}</text>
      <text transform="translate(${left + (t + 0.5) * cell + 4} ${head - 5}) rotate(-90)" class="muted">${cut(piece.text)}</text></g>`)}
    <g transform="translate(${side} ${top})">
      <text class="strong" x="0" y="12">layer ${inputs.layer}, head ${inputs.head}</text><text class="muted" x="118" y="12">stronger: sharper</text>
      ${Array.from({ length: 36 }, (_, i) => { const l = Math.floor(i / 6) + 1, g = (i % 6) + 1, isNow = l === inputs.layer && g === inputs.head;
        return h`<g key=${i} class="handle" onClick=${() => act({ layer: l, head: g })}><rect x=${(g - 1) * (pick + 3)} y=${20 + (l - 1) * (pick + 3)} width=${pick} height=${pick} rx="4" fill="var(--accent)" fill-opacity=${isNow ? 1 : 0.06 + 0.5 * d.peaks[l - 1][g - 1] ** 2} stroke=${isNow ? "var(--text)" : "none"} stroke-width="2"><title>layer ${l}, head ${g}: at most ${number(100 * d.peaks[l - 1][g - 1])} % on one token</title></rect><text x=${(g - 1) * (pick + 3) + pick / 2} y=${20 + (l - 1) * (pick + 3) + 15} text-anchor="middle" class=${isNow ? "on" : ""}>${g}</text></g>`; })}
    </g>
    <text x=${side} y=${rowTop - 10}>to say “${d.said[d.at].text}” it looks at</text>
    ${d.seen.map((/** @type {any} */ piece, /** @type {number} */ t) => h`<g key=${t} transform="translate(${side} ${rowTop + t * rowHeight})">
      <text x=${left - 6} y=${rowHeight - 4} text-anchor="end">${cut(piece.text)}</text><rect x=${left} y="1" width=${Math.max(0.6, bar(d.row[t]))} height=${rowHeight - 3} fill="var(--accent)" />
      ${d.row[t] > 0.02 && h`<text class="muted" x=${left + bar(d.row[t]) + 5} y=${rowHeight - 4}>${number(100 * d.row[t])} %</text>`}</g>`)}
  </svg>`;
}

/** @param {string} text */
const cut = (text) => (text.length > 11 ? `${text.slice(0, 10)}…` : text);

/** @param {any} h @param {any} d @param {number} width */
function logits(h, d, width) {
  const isNarrow = width < 620, half = isNarrow ? width : width / 2 - 16, row = 24, least = Math.min(...d.candidates.map((/** @type {any} */ one) => one.logit));
  const most = Math.max(...d.candidates.map((/** @type {any} */ one) => one.logit)), x = linear([Math.min(0, least), most], [0, half - 150]);
  const height = 30 + d.candidates.length * row, second = isNarrow ? height + 20 : 0, lens = linear([0, 1], [1, Math.max(20, half - 236)]);
  return h`<svg viewBox="0 0 ${width} ${isNarrow ? second + 30 + d.by_layer.length * 30 : height}" role="img" aria-label="Logits of the likeliest tokens, and what each layer would say">
    <text class="strong" x="0" y="14">logits: the largest of all tokens</text>
    ${d.candidates.map((/** @type {any} */ one, /** @type {number} */ i) => h`<g key=${one.id} transform="translate(0 ${26 + i * row})"><text x="86" y="15" text-anchor="end" class=${one.id === d.said[d.at].id ? "strong" : ""}>${cut(one.text)}</text>
      <rect x="94" y="3" width=${Math.max(1, x(one.logit))} height="16" fill=${one.id === d.said[d.at].id ? "var(--compute)" : "var(--activations)"} fill-opacity=${one.id === d.said[d.at].id ? 1 : 0.7} /><text class="muted" x=${100 + x(one.logit)} y="15">${one.logit.toFixed(2)}</text></g>`)}
    <g transform="translate(${isNarrow ? 0 : width / 2 + 16} ${second})">
      <text class="strong" x="0" y="14">what the state would say after each layer</text>
      ${d.by_layer.map((/** @type {any} */ one, /** @type {number} */ i) => { const isRight = one.text === d.by_layer[d.by_layer.length - 1].text;
        return h`<g key=${i} transform="translate(0 ${26 + i * 30})"><text class="muted" x="0" y="16">${i === 0 ? "embedding" : `layer ${one.layer}`}</text>
          <rect x="72" y="3" width="92" height="20" rx="4" fill=${isRight ? "var(--compute)" : "var(--free)"} /><text x="118" y="17" text-anchor="middle" class=${isRight ? "on" : ""}>${cut(one.text)}</text>
          <rect x="172" y="6" width=${lens(one.probability)} height="13" fill=${isRight ? "var(--compute)" : "var(--waiting)"} /><text class="muted" x=${177 + lens(one.probability)} y="17">${number(100 * one.probability)} %</text></g>`; })}
    </g>
  </svg>`;
}

/** @param {any} h @param {any} d @param {number} width @param {any} inputs */
function sampling(h, d, width, inputs) {
  const row = 30, left = 92, x = linear([0, 1], [0, width - left - 150]), pct = (/** @type {number} */ p) => `${number(100 * p)} %`;
  return h`<svg viewBox="0 0 ${width} ${52 + d.candidates.length * row}" role="img" aria-label="Probabilities before and after temperature ${inputs.temperature} and top-p ${inputs.top_p}">
    <rect x="0" y="4" width="10" height="10" fill="var(--activations)" fill-opacity=".55" /><text class="muted" x="15" y="13">as the model says it</text>
    <rect x=${width < 520 ? 0 : 150} y=${width < 520 ? 22 : 4} width="10" height="10" fill="var(--compute)" /><text class="muted" x=${width < 520 ? 15 : 165} y=${width < 520 ? 31 : 13}>what is drawn from: temperature ${inputs.temperature}, top-p ${inputs.top_p}${inputs.top_k ? `, top-k ${inputs.top_k}` : ""}</text>
    ${d.candidates.map((/** @type {any} */ one, /** @type {number} */ i) => { const isDrawn = one.id === d.said[d.at].id, y = 40 + i * row;
      return h`<g key=${one.id} opacity=${one.drawn_from > 0 ? 1 : 0.45}><text x=${left - 8} y=${y + 17} text-anchor="end" class=${isDrawn ? "strong" : ""}>${cut(one.text)}</text>
        <rect x=${left} y=${y + 2} width=${Math.max(1, x(one.probability))} height="9" fill="var(--activations)" fill-opacity=".55" />
        <rect x=${left} y=${y + 13} width=${Math.max(one.drawn_from > 0 ? 1 : 0, x(one.drawn_from))} height="9" fill="var(--compute)" />
        <text class=${isDrawn ? "strong" : "muted"} x=${left + Math.max(x(one.probability), x(one.drawn_from)) + 8} y=${y + 17} fill=${isDrawn ? "var(--compute)" : undefined}>${one.drawn_from > 0 ? `${pct(one.probability)} → ${pct(one.drawn_from)}` : `${pct(one.probability)} → out`}${isDrawn ? "  ← drawn" : ""}</text></g>`; })}
  </svg>`;
}

/** @param {any} h @param {any} d @param {number} width */
function text(h, d, width) {
  const placed = flow(d.said, (/** @type {any} */ one) => one.text, width, 34), rows = placed[placed.length - 1].row + 1;
  return h`<svg viewBox="0 0 ${width} ${rows * 76}" role="img" aria-label="Tokens of the answer, and the text that each gives">
    ${placed.map((p, i) => h`<g key=${i} transform="translate(${p.x} ${p.row * 76})">
      <rect x="0" y="2" width=${p.wide} height="28" rx="5" fill=${p.one.gave ? "var(--compute)" : "var(--waiting)"} /><text class="on" x=${p.wide / 2} y="21" text-anchor="middle">${p.one.text}</text>
      <path d="M${p.wide / 2},32 v10" stroke="var(--muted)" /><text x=${p.wide / 2} y="57" text-anchor="middle" class=${p.one.gave ? "strong" : "muted"}>${p.one.gave ? p.one.gave.replaceAll(" ", "␣") : "no text"}</text></g>`)}
  </svg>`;
}

/** @param {any} h @param {any} d @param {number} width */
function stop(h, d, width) {
  const isStop = d.reason === "stop", last = d.said[d.said.length - 1], row = 22, left = 92, x = linear([0, 1], [0, width - left - 74]);
  const shown = d.said.slice(-12);
  return h`<svg viewBox="0 0 ${width} ${shown.length * row + 70}" role="img" aria-label="The answer ends: ${d.reason}">
    ${shown.map((/** @type {any} */ one, /** @type {number} */ i) => { const isEnd = isStop && one === last;
      return h`<g key=${i} transform="translate(0 ${i * row})"><text x=${left - 8} y="15" text-anchor="end" class=${isEnd ? "strong" : ""}>${cut(one.text)}</text><rect x=${left} y="3" width=${Math.max(1, x(one.probability))} height="15" fill=${isEnd ? "var(--accent)" : "var(--compute)"} fill-opacity=${isEnd ? 1 : 0.7} /><text class="muted" x=${left + x(one.probability) + 6} y="15">${number(100 * one.probability)} %</text></g>`; })}
    <text class="strong" x="0" y=${shown.length * row + 28}>${isStop ? `${d.stop} was drawn: the answer is whole.` : "No stop token was drawn: the answer is cut at the longest length."}</text>
    <text class="muted" x="0" y=${shown.length * row + 50}>${isStop ? "Its finish reason is “stop”; it is counted, and gives no text." : "Its finish reason is “length”."}</text>
  </svg>`;
}

/** The answer so far; each token can be looked at. @param {any} h @param {any} d @param {number} width @param {any} act */
function said(h, d, width, act) {
  const placed = flow(d.said, (/** @type {any} */ one) => one.text, width, 30), rows = placed[placed.length - 1].row + 1;
  return h`<svg viewBox="0 0 ${width} ${rows * 32 + 38}" role="img" aria-label="The answer, token by token">
    <text class="muted" x="0" y="24">${width < 520 ? "the answer; choose a token" : "the answer, token by token; choose the one to look at"}</text>
    ${placed.map((p, i) => h`<g key=${i} class="handle" transform="translate(${p.x} ${34 + p.row * 32})" onClick=${() => act({ at: i })}>
      <rect x="1" y="1" width=${p.wide - 2} height="25" rx="5" fill=${i === d.at ? "var(--compute)" : "var(--panel)"} stroke="var(--compute)" stroke-width="1.5" /><text x=${p.wide / 2} y="18" text-anchor="middle" class=${i === d.at ? "on" : ""}>${p.one.text}</text></g>`)}
  </svg>`;
}
