// Do scales, figures and the stops of sliders say what they should? node --test
import assert from "node:assert/strict";
import test from "node:test";

const { amount, both, number, seconds } = await import("lab/format.js");
const { linear, log, apart } = await import("lab/svg.js");
const { stops } = await import("lab/controls.js");
const { asCsv } = await import("lab/details.js");
globalThis.sessionStorage = { getItem: () => null, setItem: () => {} };
globalThis.document = { querySelector: () => null };
const { ask } = await import("lab/api.js");

test("figures have three digits and a unit that suits", () => {
  assert.equal(number(0.012345), "0.0123");
  assert.equal(number(321234), "321,200");
  assert.equal(number(1e-7), "< 0.0001");
  assert.equal(number(NaN), "–");
  assert.equal(seconds(0.0548), "54.8 ms");
  assert.equal(amount(141e9, "B"), "141 GB");
  assert.equal(amount(0.868, "$"), "$0.868");
  assert.equal(amount(99.36, "%"), "99.4 %");
});

test("bytes are told in both ways", () => {
  assert.equal(both(42949672960, "B"), "42.9 GB = 40 GiB");
  assert.equal(both(5, "s"), "");
});

test("scales and their inverses agree", () => {
  for (const scale of [linear([2, 10], [0, 400]), log([0.5, 2000], [46, 700])])
    for (const value of [2, 3.7, 10]) assert.ok(Math.abs(scale.invert(scale(value)) - value) < 1e-9);
  assert.deepEqual(linear([0, 10], [0, 1]).ticks(5), [0, 2, 4, 6, 8, 10]);
  assert.deepEqual(log([0.5, 2000], [0, 1]).ticks(), [1, 10, 100, 1000]);
});

test("a logarithmic slider stops at each bound and rises", () => {
  const found = stops({ scale: "log", kind: "integer", low: 1, high: 1000 });
  assert.equal(found[0], 1);
  assert.equal(found.at(-1), 1000);
  assert.ok(found.includes(32) && found.every((value, i) => i === 0 || value > found[i - 1]));
  assert.deepEqual(stops({ scale: "powers", kind: "integer", low: 1, high: 8 }), [1, 2, 4, 8]);
  assert.equal(stops({ scale: "linear", low: 0, high: 1 }), null);
});

test("labels do not lie over each other", () => {
  const placed = apart([{ x: 0, y: 10, text: "one" }, { x: 4, y: 11, text: "two" }, { x: 900, y: 10, text: "far" }]);
  const [far, one, two] = ["far", "one", "two"].map((text) => placed.find((each) => each.text === text));
  assert.ok(two.y >= one.y + 12);
  assert.equal(far.y, 10);
});

test("a table is CSV that others read", () => {
  assert.equal(asCsv([{ title: "t", columns: ["a", "b"], rows: [['say "x", y', 1.5]] }]), 't\na,b\n"say ""x"", y",1.5');
});

test("a page asks again when a busy server says so, until the slider moves on", async () => {
  const replies = [[503, { "retry-after": "0.01" }, { error: { message: "too much" } }], [200, {}, { sentence: "done" }]];
  globalThis.fetch = async () => { const [status, headers, told] = replies.shift() ?? [503, { "retry-after": "60" }, {}]; return new Response(JSON.stringify(told), { status, headers }); };
  const waits = [], page = { name: "memory_wall", long: false }, nothing = () => {};
  const answer = await ask(page, {}, new AbortController().signal, nothing, nothing, (wait) => waits.push(wait));
  assert.equal(answer.sentence, "done");
  assert.deepEqual(waits, ["The lab is busy: too much. This page does."]);
  const leave = new AbortController();
  await assert.rejects(ask(page, {}, leave.signal, nothing, nothing, () => leave.abort()), { name: "AbortError" });
});
