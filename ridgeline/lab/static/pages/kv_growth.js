// How does the memory fill while answers grow, which blocks of the pool does each request hold, and how many requests fit?
import { useState } from "preact/hooks";
import { axisX, axisY, dragged, linear } from "lab/svg.js";
import { number, scaled } from "lab/format.js";
import { Play } from "lab/play.js";

const FREE = 0, SHARED = 1; // of a cell; request i is i + 2
const LEFT = 42, SHADES = [0.95, 0.6, 0.8, 0.45, 0.7];

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const [chosen, choose] = useState(-1);
  const d = answer.drawing;
  const last = d.points[d.points.length - 1].generated;
  const x = linear([0, last], [LEFT, width - 10]);
  const handle = dragged(width, (px) => act({ generated: Math.round(Math.max(0, Math.min(last, x.invert(px))) / 10) * 10 }));
  return h`<div>
    ${memory(h, d, x, width, handle)}
    ${fit(h, d, x, width)}
    <${Play} at=${d.generated} last=${last} by=${Math.max(10, Math.round(last / 400) * 10)} ms="450" go=${(/** @type {number} */ generated) => act({ generated })} />
    ${d.pool && grid(h, d, width, chosen, choose)}
  </div>`;
}

/** The memory of a device, stacked, over generated tokens.
 * @param {any} h @param {any} d @param {any} x @param {number} width @param {any} handle */
function memory(h, d, x, width, handle) {
  const height = width < 520 ? 240 : 290, top = 16, bottom = height - 38;
  const fixed = d.fixed.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.bytes, 0);
  const most = Math.max(d.memory_bytes, Math.min(fixed + d.points[d.points.length - 1].bytes, 1.7 * d.memory_bytes)) * 1.04;
  const y = linear([0, most], [bottom, top]);
  const right = x(d.points[d.points.length - 1].generated);
  let base = 0;
  const bands = d.fixed.map((/** @type {any} */ one) => { const from = base; base += one.bytes; return { ...one, from, to: base }; });
  const line = d.points.map((/** @type {any} */ one) => `${x(one.generated)},${y(Math.min(fixed + one.bytes, most))}`);
  const area = `M${x(0)},${y(fixed)} L${line.join(" L")} L${right},${y(fixed)}Z`;
  const here = x(d.generated), end = Math.min(fixed + d.cache_bytes, most), room = y(d.capacity_bytes);
  const isOver = fixed + d.cache_bytes > d.capacity_bytes;
  const cache = `KV${width < 520 ? "" : ` of ${d.users} ${d.users === 1 ? "request" : "requests"}`}: ${scaled(d.cache_bytes, "B")}`;
  const flip = here + 14 + 7 * cache.length > width;
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-labelledby="kg-title kg-desc">
    <title id="kg-title">Memory of one ${d.device} over generated tokens</title>
    <desc id="kg-desc">Weights and working space stay; keys and values of all requests grow to ${scaled(d.cache_bytes, "B")} after ${d.generated} generated tokens. ${scaled(d.capacity_bytes, "B")} may be taken.</desc>
    <defs>
      <clipPath id="kg-over"><rect x=${LEFT} y=${top} width=${width} height=${Math.max(0, room - top)} /></clipPath>
      <pattern id="kg-hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="3" height="7" fill="var(--panel)" fill-opacity=".75" /></pattern>
    </defs>
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(width < 520 ? 4 : 8), label: "generated tokens, of each request", end: right })}
    ${axisY({ scale: y, x: LEFT, right, ticks: y.ticks(5), format: (v) => number(v / 1e9) })}
    <text class="muted" x="0" y=${top - 4}>GB</text>
    ${bands.map((/** @type {any} */ one) => h`<rect key=${one.name} x=${x(0)} width=${right - x(0)} y=${y(one.to)} height=${Math.max(0, y(one.from) - y(one.to))} fill="var(--${one.means})"><title>${one.name}: ${scaled(one.bytes, "B")}</title></rect>`)}
    <path d=${area} fill="var(--kv)" />
    <g clip-path="url(#kg-over)"><path d=${area} fill="url(#kg-hatch)" /></g>
    <line x1=${x(0)} x2=${right} y1=${room} y2=${room} stroke="var(--text)" stroke-width="1.5" stroke-dasharray="6 4" />
    <text class="halo" x=${x(0) + 8} y=${room - 6}>${scaled(d.capacity_bytes, "B")} may be taken</text>
    ${bands.filter((/** @type {any} */ one) => y(one.from) - y(one.to) > 15).map((/** @type {any} */ one) => h`<text key=${one.name} class="on" x=${x(0) + 8} y=${(y(one.from) + y(one.to)) / 2 + 4}>${one.name} ${scaled(one.bytes, "B")}</text>`)}
    <g ...${handle} role="presentation">
      <rect x=${here - 16} y=${top} width="32" height=${bottom - top} fill="transparent" />
      <line x1=${here} x2=${here} y1=${top} y2=${bottom} stroke="var(--accent)" stroke-width="2" />
      <circle cx=${here} cy=${y(end)} r="7" fill="var(--accent)" stroke="var(--panel)" stroke-width="2" />
    </g>
    <text class="halo strong" x=${here + (flip ? -12 : 12)} y=${top + 11} text-anchor=${flip ? "end" : "start"} fill="var(--kv)">${cache}</text>
    ${isOver && h`<text class="halo" x=${here + (flip ? -12 : 12)} y=${top + 27} text-anchor=${flip ? "end" : "start"}>has no room</text>`}
  </svg>`;
}

/** How many requests of that length fit, over the same axis.
 * @param {any} h @param {any} d @param {any} x @param {number} width */
function fit(h, d, x, width) {
  const height = 118, top = 24, bottom = height - 10;
  const most = Math.max(1.6 * d.users, Math.min(4 * d.users, ...[Math.max(...d.points.map((/** @type {any} */ one) => one.fit))]), 4);
  const y = linear([0, most], [bottom, top]), cut = (/** @type {number} */ fit) => y(Math.min(fit, 1.05 * most));
  const right = x(d.points[d.points.length - 1].generated);
  const here = d.points.find((/** @type {any} */ one) => one.generated === d.generated);
  const steps = d.points.map((/** @type {any} */ one) => `${x(one.generated)},${y(one.fit)}`).join(" ");
  const flip = x(d.generated) > (LEFT + width) / 2, asked = y(d.users), piece = cut(d.reserved_fit);
  const isClose = Math.abs(asked - piece) < 15;
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Requests that fit after ${d.generated} generated tokens: ${here.fit}; asked for are ${d.users}">
    <text class="muted" x="0" y="11">requests that fit</text>
    ${axisY({ scale: y, x: LEFT, right, ticks: y.ticks(3), format: number })}
    <line x1=${x(0)} x2=${right} y1=${piece} y2=${piece} stroke="var(--waiting)" stroke-width="1.5" stroke-dasharray="2 3" />
    <line x1=${x(0)} x2=${right} y1=${asked} y2=${asked} stroke="var(--text)" stroke-dasharray="6 4" />
    <clipPath id="kg-fit"><rect x=${LEFT} y=${top - 4} width=${width} height=${bottom - top + 8} /></clipPath>
    <polyline points=${steps} fill="none" stroke="var(--kv)" stroke-width="2.5" stroke-linejoin="round" clip-path="url(#kg-fit)" />
    <text class="halo" x=${right} y=${asked - 5} text-anchor="end">${d.users} asked for</text>
    <text class="halo muted" x=${x(0) + 6} y=${piece + (isClose && piece > asked ? 14 : -5)}>${d.reserved_fit} ${width < 520 ? "if reserved whole" : "if each had its longest length reserved"}</text>
    <circle cx=${x(d.generated)} cy=${cut(here.fit)} r="6" fill="var(--accent)" stroke="var(--panel)" stroke-width="2" />
    <text class="halo strong" x=${x(d.generated) + (flip ? -10 : 10)} y=${Math.max(top + 4, cut(here.fit) - 8)} text-anchor=${flip ? "end" : "start"} fill="var(--accent)">${here.fit.toLocaleString("en-US")} fit</text>
  </svg>`;
}

/** The pool of blocks, and the table of each of the first requests.
 * @param {any} h @param {any} d @param {number} width @param {number} chosen @param {(request: number) => void} choose */
function grid(h, d, width, chosen, choose) {
  const { pool } = d, gap = 1, size = width < 520 ? 10 : 13;
  const columns = Math.floor(width / (size + gap)), rows = Math.ceil(pool.cells.length / columns);
  const top = 40, shownTables = pool.tables.slice(0, width < 520 ? 5 : 8), row = 17;
  const below = top + rows * (size + gap) + 36, height = below + shownTables.length * row + 4;
  const fill = (/** @type {number} */ owner) => (owner === FREE ? "var(--free)" : owner === SHARED ? "var(--accent)" : "var(--kv)");
  const shade = (/** @type {number} */ owner) => (owner <= SHARED ? 1 : chosen < 0 ? SHADES[(owner - 2) % SHADES.length] : owner - 2 === chosen ? 1 : 0.18);
  const each = pool.blocks_per_cell === 1 ? "a block" : `${pool.blocks_per_cell} blocks`;
  const most = Math.max(1, ...pool.tables.map((/** @type {any} */ one) => one.shared + one.own));
  const nameWidth = 74, wide = width - nameWidth - (width < 520 ? 74 : 152), w = (/** @type {number} */ blocks) => (wide * blocks) / most;
  const waiting = pool.tables.length - d.running;
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Block pool: ${pool.num_blocks} blocks, ${pool.num_free} free, ${pool.num_shared} shared" onMouseLeave=${() => choose(-1)}>
    <text class="strong" x="0" y="14">Block pool</text>
    <text class="muted" x="74" y="14">${pool.num_blocks.toLocaleString("en-US")} blocks of ${pool.block_size} tokens${width < 520 ? "" : `; a cell is ${each}`}</text>
    <g transform="translate(0 31)">
      ${[["var(--free)", `free ${number((100 * pool.num_free) / pool.num_blocks)} %`], ["var(--kv)", width < 520 ? "held" : "held by one request"], ["var(--accent)", "shared"]]
        .reduce((/** @type {any} */ done, [colour, text]) => { done.parts.push(h`<rect key=${text} x=${done.x} y="-9" width="10" height="10" fill=${colour} /><text key=${`${text}.`} class="muted" x=${done.x + 14} y="0">${text}</text>`); done.x += text.length * 6.3 + 28; return done; }, { x: 0, parts: /** @type {any[]} */ ([]) }).parts}
    </g>
    <g class="still">${pool.cells.map((/** @type {number} */ owner, /** @type {number} */ i) => h`<rect key=${i} x=${(i % columns) * (size + gap)} y=${top + Math.floor(i / columns) * (size + gap)} width=${size} height=${size} rx="1.5" fill=${fill(owner)} fill-opacity=${shade(owner)} onMouseEnter=${() => choose(owner - 2)} />`)}</g>
    <text class="muted" x="0" y=${below - 9}>block tables${waiting > 0 ? `; ${waiting} of ${pool.tables.length} requests wait` : pool.tables.length > shownTables.length ? ` of the first ${shownTables.length} of ${pool.tables.length} requests` : ""}</text>
    ${shownTables.map((/** @type {any} */ held, /** @type {number} */ i) => {
      const y = below + i * row, blocks = held.shared + held.own;
      return h`<g key=${held.request} onMouseEnter=${() => choose(held.request)} opacity=${chosen < 0 || chosen === held.request ? 1 : 0.45}>
        <rect x="0" y=${y} width=${width} height=${row} fill="transparent" />
        <text x="0" y=${y + 11}>request ${held.request + 1}</text>
        ${blocks === 0 ? h`<text class="muted" x=${nameWidth} y=${y + 11}>waits</text>` : h`
          <rect x=${nameWidth} y=${y + 2} width=${w(held.shared)} height="10" fill="var(--accent)" />
          <rect x=${nameWidth + w(held.shared)} y=${y + 2} width=${w(held.own)} height="10" fill="var(--kv)" />
          <text class="muted" x=${nameWidth + w(blocks) + 6} y=${y + 11}>${blocks} blocks${held.spare && width >= 520 ? `, ${held.spare} slots spare` : ""}</text>`}
      </g>`;
    })}
  </svg>`;
}
