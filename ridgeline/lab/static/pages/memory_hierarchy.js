// Which memories feed the arithmetic, how wide are the ways between them, and what lives in each?
import { number, scaled, seconds } from "lab/format.js";

const NAMES = /** @type {Record<string, string>} */ ({ SRAM: "SRAM of the multiprocessors", "last cache": "last cache", memory: "the device's memory", "host memory": "host memory", disk: "disk" });

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing, isNarrow = width < 560;
  const sizes = d.levels.map((/** @type {any} */ one) => one.bytes).filter(Boolean);
  const least = Math.log10(Math.min(...sizes)), largest = Math.log10(Math.max(...sizes)) + 0.7;
  const narrowest = width < 380 ? 0.82 : isNarrow ? 0.66 : 0.36;
  const share = (/** @type {number | null} */ bytes) => (bytes === null ? 1 : narrowest + (1 - narrowest) * ((Math.log10(bytes) - least) / (largest - least)));
  const rates = d.levels.map((/** @type {any} */ one) => one.bytes_per_s).filter(Boolean);
  const slow = Math.log10(Math.min(...rates)), fast = Math.log10(Math.max(...rates));
  const pipe = (/** @type {number} */ rate) => 3 + 40 * ((Math.log10(rate) - slow) / (fast - slow || 1));
  let y = 56;
  const rows = d.levels.map((/** @type {any} */ level) => {
    const items = d.items.filter((/** @type {any} */ one) => one.home === level.name);
    const row = { level, items, y, height: 32 + (level.held.length ? 26 : 0) + (items.length ? 8 : 0) + chipRows(items, share(level.bytes) * width - 24) * 21 };
    y += row.height + 40;
    return row;
  });
  const middle = width / 2;
  return h`<svg viewBox="0 0 ${width} ${y - 30}" role="img" aria-labelledby="mh-title mh-desc">
    <title id="mh-title">Memories of ${d.device}, the fastest first</title>
    <desc id="mh-desc">${d.levels.map((/** @type {any} */ one) => `${one.name}: ${one.bytes ? scaled(one.bytes, "B") : "any size"}, ${one.bytes_per_s ? scaled(one.bytes_per_s, "B/s") : "speed not published"}`).join("; ")}</desc>
    <rect x=${middle - 92} y="2" width="184" height="26" rx="6" fill="var(--compute)" /><text class="on" x=${middle} y="20" text-anchor="middle">arithmetic</text>
    ${rows.map((/** @type {any} */ row, /** @type {number} */ i) => way(h, row, i === 0 ? 28 : rows[i - 1].y + rows[i - 1].height, middle, pipe, d, width))}
    ${rows.map((/** @type {any} */ row) => box(h, row, share(row.level.bytes) * width, middle, isNarrow))}
  </svg>`;
}

/** How many lines the names of items take. @param {any[]} items @param {number} width */
function chipRows(items, width) {
  return items.length ? lay(items, width)[items.length - 1].row + 1 : 0;
}

/** Where each name goes, line by line. @param {any[]} items @param {number} width */
function lay(items, width) {
  let x = 0, row = 0;
  return items.map((one) => {
    const text = `${one.name} ${scaled(one.bytes, "B")}`, wide = text.length * 6.3 + 20;
    if (x > 0 && x + wide > width) { x = 0; row += 1; }
    const at = { one, text, x, row, wide };
    x += wide + 6;
    return at;
  });
}

/** The way up from a memory: as wide as it is fast (each step ten times), with the time that the weights take.
 * @param {any} h @param {any} row @param {number} from @param {number} middle @param {(rate: number) => number} pipe @param {any} d @param {number} width */
function way(h, row, from, middle, pipe, d, width) {
  const { level, y } = row, wide = level.bytes_per_s ? pipe(level.bytes_per_s) : 10, busy = d.step_s[level.name];
  const text = level.bytes_per_s ? scaled(level.bytes_per_s, "B/s") : width < 560 ? "no figure" : "speed not published";
  return h`<g key=${`way ${level.name}`}>
    <rect x=${middle - wide / 2} y=${from} width=${wide} height=${y - from} fill=${level.bytes_per_s ? "var(--accent)" : "none"} fill-opacity=".55" stroke=${level.bytes_per_s ? "none" : "var(--muted)"} stroke-dasharray="3 3" />
    <text class="halo strong" x=${middle - wide / 2 - 8} y=${(from + y) / 2 + 4} text-anchor="end">${text}</text>
    ${level.read_s !== null && h`<text class="halo muted" x=${middle + wide / 2 + 8} y=${(from + y) / 2 + 4}>${busy ? `a step: ${seconds(busy)}` : width < 560 ? `weights: ${seconds(level.read_s)}` : `weights once: ${seconds(level.read_s)}`}</text>`}
  </g>`;
}

/** @param {any} h @param {any} row @param {number} wide @param {number} middle @param {boolean} isNarrow */
function box(h, row, wide, middle, isNarrow) {
  const { level, items, y, height } = row, left = middle - wide / 2;
  const size = level.bytes === null ? "as large as you like" : scaled(level.bytes, "B");
  const title = isNarrow && wide < 260 ? level.name : NAMES[level.name];
  const total = level.held.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.bytes, 0);
  const space = wide - 24, whole = Math.max(level.bytes ?? total, total) || 1;
  let x = left + 12;
  const start = y + 34 + (level.held.length ? 26 : 0);
  return h`<g key=${level.name}>
    <rect x=${left} y=${y} width=${wide} height=${height} rx="8" fill="var(--panel)" stroke="var(--line)" stroke-width="1.5" />
    <text class="strong" x=${left + 12} y=${y + 20}>${title}</text>
    <text class="muted" x=${left + wide - 12} y=${y + 20} text-anchor="end">${size}</text>
    ${level.held.length > 0 && h`<g><rect x=${left + 12} y=${y + 30} width=${space} height="18" fill="var(--free)" />
      ${level.held.map((/** @type {any} */ one) => { const w = Math.max(1, (space * one.bytes) / whole), at = x; x += w;
        return h`<g key=${one.name}><rect x=${at} y=${y + 30} width=${w} height="18" fill="var(--${one.means})"><title>${one.name}: ${scaled(one.bytes, "B")}</title></rect>
          ${w > 110 && h`<text class="on" x=${at + 6} y=${y + 43}>${one.name} ${scaled(one.bytes, "B")}</text>`}</g>`; })}</g>`}
    ${lay(items, space).map((chip) => h`<g key=${chip.one.name} transform="translate(${left + 12 + chip.x} ${start + chip.row * 21})">
      <rect x="0" y="0" width="10" height="10" y="1" fill="var(--${chip.one.means})" /><text x="15" y="10">${chip.text}</text></g>`)}
  </g>`;
}
