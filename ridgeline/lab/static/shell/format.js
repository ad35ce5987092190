// How is a figure written? Three digits, a prefix that suits, and both GB and GiB where it is asked.

const PREFIXES = /** @type {[string, number][]} */ ([["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]);
const SCALED = new Set(["B", "B/s", "FLOP", "FLOP/s", "bit"]);

/** "0.0123", "45.6", "321,200". @param {number} value */
export function number(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return value > 0 ? "< 0.0001" : "0";
  const size = Math.abs(value);
  const text = Number(value.toPrecision(size >= 1000 ? 4 : 3));
  return text.toLocaleString("en-US", { maximumSignificantDigits: 6 });
}

/** "54.8 ms". @param {number} value */
export function seconds(value) {
  const size = Math.abs(value);
  if (size >= 120) return `${number(value / 60)} min`;
  if (size >= 0.9995 || size === 0) return `${number(value)} s`;
  if (size >= 0.9995e-3) return `${number(value * 1e3)} ms`;
  return `${number(value * 1e6)} µs`;
}

/** "23.8 MB". @param {number} value @param {string} unit */
export function scaled(value, unit) {
  for (const [prefix, size] of PREFIXES)
    if (Math.abs(value) >= 0.9995 * size) return `${number(value / size)} ${prefix}${unit}`;
  return `${number(value)} ${unit}`;
}

/** A figure with its unit. @param {number} value @param {string} unit */
export function amount(value, unit) {
  if (unit === "s") return seconds(value);
  if (SCALED.has(unit)) return scaled(value, unit);
  return unit === "" ? number(value) : unit === "$" ? `$${number(value)}` : `${number(value)} ${unit}`;
}

/** Bytes in both ways, for a tooltip. @param {number} value @param {string} unit */
export function both(value, unit) {
  if (unit !== "B" || Math.abs(value) < 1024) return "";
  const power = Math.min(4, Math.floor(Math.log2(Math.abs(value)) / 10));
  return `${scaled(value, "B")} = ${number(value / 2 ** (10 * power))} ${["", "K", "M", "G", "T"][power]}iB`;
}
