// Which tile of scores is on the chip now, what is kept of each row, and how many bytes does each way move?
import { axisX, axisY, linear, log } from "lab/svg.js";
import { number, scaled } from "lab/format.js";
import { Play } from "lab/play.js";

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing, last = d.visits.length, step = Math.min(inputs.step, last);
  const isNarrow = width < 620;
  const grid = Math.min(isNarrow ? width : width * 0.42, 360);
  return h`<div>
    <svg viewBox="0 0 ${width} ${isNarrow ? grid + 354 : Math.max(grid + 10, 330)}" role="img" aria-labelledby="fa-title fa-desc">
      <title id="fa-title">Attention of 16 tokens in tiles of 4 x 4, after ${step} of ${last} tiles</title>
      <desc id="fa-desc">${told(d, step)}</desc>
      ${matrix(h, d, step, grid, act)}
      <g transform=${isNarrow ? `translate(8 ${grid + 44})` : `translate(${grid + 34} 0)`}>${chip(h, d, step, isNarrow ? width - 8 : width - grid - 34, isNarrow ? 296 : Math.max(grid, 300))}</g>
    </svg>
    <${Play} at=${step} last=${last} what="tile" go=${(/** @type {number} */ at) => act({ step: at })} />
    ${traffic(h, d, inputs, width)}
  </div>`;
}

/** @param {any} d @param {number} step */
function told(d, step) {
  if (step === 0) return "Nothing is done yet.";
  const visit = d.visits[step - 1];
  return `Queries ${visit.row_tile * d.tile + 1} to ${(visit.row_tile + 1) * d.tile} have met keys up to ${(visit.column_tile + 1) * d.tile}.`;
}

/** All scores, of which only one tile exists at a time. @param {any} h @param {any} d @param {number} step @param {number} size @param {any} act */
function matrix(h, d, step, size, act) {
  const n = d.scores.length, left = 24, top = 22, cell = (size - left) / n, now = step > 0 ? d.visits[step - 1] : null;
  const done = new Map(d.visits.slice(0, step).map((/** @type {any} */ one, /** @type {number} */ i) => [`${one.row_tile} ${one.column_tile}`, i]));
  const index = new Map(d.visits.map((/** @type {any} */ one, /** @type {number} */ i) => [`${one.row_tile} ${one.column_tile}`, i + 1]));
  const strength = (/** @type {number} */ score) => Math.max(0.08, Math.min(1, 0.5 + score / 12));
  const tiles = n / d.tile;
  return h`<g>
    <text class="muted" x=${left} y="12">keys and values →</text>
    <text class="muted" transform="translate(12 ${top + 2}) rotate(90)">queries →</text>
    <g class="still">${d.scores.map((/** @type {any[]} */ row, /** @type {number} */ q) => row.map((score, k) => {
      const tile = `${Math.floor(q / d.tile)} ${Math.floor(k / d.tile)}`, isNow = now && tile === `${now.row_tile} ${now.column_tile}`;
      const x = left + k * cell, y = top + q * cell;
      if (score === null) return h`<rect key=${`${q} ${k}`} x=${x + 0.5} y=${y + 0.5} width=${cell - 1} height=${cell - 1} fill="var(--free)" fill-opacity=".45" />`;
      return h`<rect key=${`${q} ${k}`} x=${x + 0.5} y=${y + 0.5} width=${cell - 1} height=${cell - 1} fill=${isNow ? "var(--compute)" : done.has(tile) ? "var(--activations)" : "var(--free)"} fill-opacity=${isNow ? strength(score) : done.has(tile) ? 0.32 * strength(score) : 1}><title>query ${q + 1}, key ${k + 1}: ${score}</title></rect>`;
    }))}</g>
    ${Array.from({ length: tiles * tiles }, (_, i) => {
      const r = Math.floor(i / tiles), c = i % tiles, at = index.get(`${r} ${c}`), isNow = now && now.row_tile === r && now.column_tile === c;
      return at === undefined ? null : h`<rect key=${i} x=${left + c * cell * d.tile} y=${top + r * cell * d.tile} width=${cell * d.tile} height=${cell * d.tile} fill="transparent" stroke=${isNow ? "var(--accent)" : "var(--line)"} stroke-width=${isNow ? 3 : 1} onClick=${() => act({ step: at })} class="handle"><title>tile ${at} of ${d.visits.length}</title></rect>`;
    })}
    ${now && h`<g fill="none" stroke="var(--kv)" stroke-width="4"><line x1=${left + now.column_tile * cell * d.tile + 2} x2=${left + (now.column_tile + 1) * cell * d.tile - 2} y1=${top - 3} y2=${top - 3} /></g>
      <line x1=${left - 3} x2=${left - 3} y1=${top + now.row_tile * cell * d.tile + 2} y2=${top + (now.row_tile + 1) * cell * d.tile - 2} stroke="var(--activations)" stroke-width="4" />`}
  </g>`;
}

/** What is on the chip: the maximum, the sum and the output of each row of the tile. @param {any} h @param {any} d @param {number} step @param {number} width @param {number} height */
function chip(h, d, step, width, height) {
  const visit = step > 0 ? d.visits[step - 1] : null, top = 60, row = (height - top - 58) / 4;
  const isLast = visit && (step === d.visits.length || d.visits[step].row_tile !== visit.row_tile);
  const isTight = width < 420;
  const columns = isTight ? [0, width * 0.09, width * 0.25, width * 0.43, width * 0.58, width * 0.715] : [0, width * 0.1, width * 0.335, width * 0.49, width * 0.635, width * 0.775];
  const heads = isTight ? ["", "max", "factor", "exp", "sum", isLast ? "o / sum" : "output"] : ["row", "maximum", "factor", "weights", "sum", isLast ? "output / sum" : "output"];
  const finite = d.scores.flat().filter((/** @type {any} */ one) => one !== null);
  const scale = linear([Math.min(...finite), Math.max(...finite)], [0, width * (isTight ? 0.13 : 0.2)]);
  return h`<g>
    <rect x="-8" y="0" width=${width + 8} height=${height} rx="8" fill="none" stroke="var(--compute)" stroke-width="1.5" />
    <text class="strong" x="4" y="20">on the chip${visit ? `: queries ${visit.row_tile * d.tile + 1}–${(visit.row_tile + 1) * d.tile}${isTight ? "," : " meet"} keys ${visit.column_tile * d.tile + 1}–${(visit.column_tile + 1) * d.tile}` : ": nothing yet"}</text>
    ${heads.map((text, i) => h`<text key=${text} class="muted" x=${columns[i] + 4} y="44">${text}</text>`)}
    ${[0, 1, 2, 3].map((i) => {
      const y = top + i * row, f = visit?.factor[i], fresh = visit && visit.old_max[i] === null;
      if (!visit) return h`<text key=${i} class="muted" x="4" y=${y + 16}>–</text>`;
      const out = visit.output[i].map((/** @type {number} */ o) => (isLast ? o / visit.sums[i] : o).toFixed(isTight ? 1 : 2));
      return h`<g key=${i}>
        <text x="4" y=${y + 16}>${visit.row_tile * d.tile + i + 1}</text>
        ${!fresh && visit.old_max[i] !== visit.new_max[i] && h`<line x1=${columns[1] + 4 + scale(visit.old_max[i])} x2=${columns[1] + 4 + scale(visit.new_max[i])} y1=${y + 24} y2=${y + 24} stroke="var(--accent)" stroke-width="2" stroke-dasharray="2 2" />`}
        <line x1=${columns[1] + 4} x2=${columns[1] + 4 + width * (isTight ? 0.13 : 0.2)} y1=${y + 24} y2=${y + 24} stroke="var(--line)" />
        <circle cx=${columns[1] + 4 + scale(visit.new_max[i])} cy=${y + 24} r="4" fill="var(--accent)" />
        <text x=${columns[1] + 4} y=${y + 14}>${fresh || isTight ? "" : `${visit.old_max[i].toFixed(1)} → `}${visit.new_max[i].toFixed(1)}</text>
        <text x=${columns[2] + 4} y=${y + 14} fill=${f < 1 && !fresh ? "var(--accent)" : undefined} class=${f < 1 && !fresh ? "strong" : ""}>${fresh ? "–" : `× ${f < 0.001 ? f.toExponential(0) : f.toFixed(isTight ? 2 : 3)}`}</text>
        <text x=${columns[4] + 4} y=${y + 14}>${visit.sums[i].toFixed(isTight ? 2 : 3)}</text>
        <text x=${columns[5] + 4} y=${y + 14} class=${isLast ? "strong" : ""} fill=${isLast ? "var(--compute)" : undefined}>${out.join("  ")}</text>
        <g class="still" transform="translate(${columns[3] + 4} ${y + 2})">${visit.weights[i].map((/** @type {number} */ w, /** @type {number} */ k) => h`<rect key=${k} x=${k * 10} y=${20 - 20 * w} width="8" height=${Math.max(0.8, 20 * w)} fill="var(--compute)"><title>weight of key ${visit.column_tile * d.tile + k + 1}: ${w.toFixed(3)}</title></rect>`)}</g>
      </g>`;
    })}
    <text class="muted" x="4" y=${top + 4 * row + 20}>${visit ? (isLast ? isTight ? "The last tile: divided by the sum." : "Last tile of these rows: the output is divided by the sum." : isTight ? "The sums are multiplied by the factor." : "What was summed is multiplied by the factor.") : "Queries meet their keys tile by tile."}</text>
    <text x="4" y=${top + 4 * row + 42}>${isLast ? isTight ? "The scores never leave the chip." : "Now it goes to memory; the scores never did." : visit ? "A larger score makes the factor less than 1." : ""}</text>
  </g>`;
}

/** Bytes of both ways over the length. @param {any} h @param {any} d @param {any} inputs @param {number} width */
function traffic(h, d, inputs, width) {
  const height = width < 520 ? 220 : 250, left = 62, right = width - 14, top = 22, bottom = height - 38;
  const x = log([d.curve[0][0], d.curve[d.curve.length - 1][0]], [left, right]);
  const all = d.curve.flatMap((/** @type {number[]} */ one) => one.slice(1));
  const y = log([Math.min(...all) / 2, Math.max(...all) * 2], [bottom, top]);
  const line = (/** @type {number} */ i) => d.curve.map((/** @type {number[]} */ one) => `${x(one[0])},${y(one[i])}`).join(" ");
  const at = Math.max(left, Math.min(right, x(inputs.tokens))), saved = d.unfused_bytes / d.tiled_bytes;
  const end = at > width * 0.6, a = y(d.unfused_bytes), b = y(d.tiled_bytes);
  const side = at + (end ? -10 : 10), anchor = end ? "end" : "start", isFar = at > width - 120;
  const other = isFar ? side : at + 16, otherAnchor = isFar ? "end" : "start";
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Bytes moved by one head: ${scaled(d.unfused_bytes, "B")} with scores in memory, ${scaled(d.tiled_bytes, "B")} with tiles">
    <text class="muted" x="0" y="12">bytes moved by one head</text>
    ${axisX({ scale: x, y: bottom, top, format: (v) => v.toLocaleString("en-US"), ticks: [64, 512, 4096, 32768, ...(width < 520 ? [] : [131072])], label: "tokens", end: right })}
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(5), format: (v) => scaled(v, "B") })}
    <polyline points=${line(1)} fill="none" stroke="var(--waiting)" stroke-width="2.5" />
    <polyline points=${line(2)} fill="none" stroke="var(--compute)" stroke-width="2.5" />
    <line x1=${at} x2=${at} y1=${a} y2=${b} stroke="var(--accent)" stroke-width="2" stroke-dasharray="4 3" />
    <circle cx=${at} cy=${a} r="5" fill="var(--waiting)" stroke="var(--panel)" stroke-width="2" /><circle cx=${at} cy=${b} r="5" fill="var(--compute)" stroke="var(--panel)" stroke-width="2" />
    <text class="halo" x=${side} y=${Math.max(top + 10, a - 6)} text-anchor=${anchor}>scores in memory: ${scaled(d.unfused_bytes, "B")}</text>
    <text class="halo strong" x=${other} y=${(a + b) / 2 + (isFar ? 4 : 8)} text-anchor=${otherAnchor} fill="var(--accent)">${saved >= 1 ? `${number(saved)} × less` : `${number(1 / saved)} × more`}</text>
    <text class="halo" x=${other} y=${b + (isFar ? 16 : 22)} text-anchor=${otherAnchor} fill="var(--compute)">tiles: ${scaled(d.tiled_bytes, "B")}</text>
  </svg>`;
}
