// Where is each request at this moment, what fills up over time, and at which rate does it give way?
import { useEffect, useRef, useState } from "preact/hooks";
import { axisX, axisY, linear, log } from "lab/svg.js";
import { number, seconds } from "lab/format.js";

const PLAY_S = 14; // seconds in which a run is shown

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  return h`<${Board} ...${{ h, d: answer.drawing, inputs, act, width }} />`;
}

/** @param {any} props */
function Board({ h, d, inputs, act, width }) {
  const busiest = d.waiting.reduce((/** @type {number} */ best, /** @type {number} */ n, /** @type {number} */ i) => (n + d.decode[i] / 1e4 > d.waiting[best] + d.decode[best] / 1e4 ? i : best), 0);
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const [plays, setPlays] = useState(false);
  const start = useRef(0);
  const now = Math.min(d.end_s, at ?? d.times[busiest]);
  useEffect(() => {
    if (!plays) return;
    let frame = 0, last = performance.now();
    const turn = (/** @type {number} */ when) => {
      start.current += ((when - last) / 1000) * (d.end_s / PLAY_S);
      last = when;
      setAt(Math.min(start.current, d.end_s));
      if (start.current >= d.end_s) setPlays(false);
      else frame = requestAnimationFrame(turn);
    };
    frame = requestAnimationFrame(turn);
    return () => cancelAnimationFrame(frame);
  }, [plays, d]);
  const go = (/** @type {number} */ when) => { start.current = when; setAt(when); };
  const isNarrow = width < 640, half = isNarrow ? width : Math.floor((width - 24) / 2), high = isNarrow ? 210 : 250;
  return h`<div>
    ${flow(h, d, now, width)}
    <div class="tools" role="group" aria-label="time">
      <button type="button" onClick=${() => { if (!plays) go(now >= d.end_s ? 0 : now); setPlays(!plays); }} aria-pressed=${plays}>${plays ? "❚❚ stop" : "▶ play"}</button>
      <button type="button" onClick=${() => { setPlays(false); go(Math.min(d.end_s, now + d.end_s / 200)); }}>step</button>
      <input type="range" min="0" max=${d.end_s} step=${d.end_s / 1000} value=${now} aria-label="moment of the run" aria-valuetext=${seconds(now)}
        onInput=${(/** @type {any} */ e) => { setPlays(false); go(+e.target.value); }} style=${{ flex: 1, minWidth: "6rem", accentColor: "var(--accent)" }} />
      <output>${seconds(now)}</output>
    </div>
    ${overTime(h, d, now, go, width)}
    <svg viewBox=${`0 0 ${width} ${isNarrow ? 2 * high + 16 : high}`} role="img" aria-labelledby="se-title se-desc">
      <title id="se-title">Latencies of this run, and by the rate of requests</title>
      <desc id="se-desc">Half of the answers come within ${seconds(quantile(d.e2e, 0.5))}, 99 % within ${seconds(quantile(d.e2e, 0.99))}. ${d.capacity ? `The fleet gives way at ${number(d.capacity)} requests a second.` : ""}</desc>
      ${spread(h, d, half, high)}
      <g transform=${isNarrow ? `translate(0 ${high + 16})` : `translate(${width - half} 0)`}>${byRate(h, d, inputs, act, half, high)}</g>
    </svg>
  </div>`;
}

/** 1, 2, 3, 5 and 7 times powers of ten. @param {number} low @param {number} high */
function between(low, high) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    for (const part of high / low > 30 ? [1, 3] : [1, 2, 3, 5, 7]) if (part * power >= low && part * power <= high) found.push(part * power);
  return found;
}

/** @param {number[]} sorted @param {number} share */
const quantile = (sorted, share) => sorted[Math.round(share * (sorted.length - 1))] ?? 0;

/** @param {number[]} times @param {number} now */
function place(times, now) {
  const step = times[1] - times[0] || 1;
  return Math.max(0, Math.min(times.length - 1, Math.round(now / step)));
}

/** Queue, prompt, answer: a band for each replica. @param {any} h @param {any} d @param {number} now @param {number} width */
function flow(h, d, now, width) {
  const top = 40, band = Math.max(15, Math.min(64, 190 / d.replicas)), high = top + band * d.replicas, r = band < 22 ? 2.4 : 3.2, pitch = 2 * r + 1.6;
  const edges = (width < 640 ? [0, 0.32, 0.5, 1] : [0, 0.27, 0.4, 1]).map((share) => 4 + share * (width - 8)), gap = 8;
  const i = place(d.times, now), rows = Math.max(1, Math.floor((band - 6) / pitch));
  const counts = [["waiting", d.waiting[i], "--waiting"], ["prompt", d.prefill[i], "--accent"], ["answer", d.decode[i], "--compute"]];
  const seen = /** @type {Record<string, number>} */ ({});
  const dots = d.requests.map((/** @type {number[]} */ [came, began, first, ended, reader, answering], /** @type {number} */ n) => {
    if (came > now || (ended >= 0 && ended <= now)) return null;
    const isIn = (/** @type {number} */ from) => from >= 0 && from <= now;
    const stage = isIn(first) ? 2 : isIn(began) ? 1 : 0;
    const replica = stage === 2 ? answering : reader, key = `${replica}-${stage}`, order = (seen[key] = (seen[key] ?? -1) + 1);
    const y0 = top + replica * band + 4 + r;
    let x, y = y0 + (order % rows) * pitch;
    if (stage === 0) x = edges[1] - gap - r - Math.floor(order / rows) * pitch;
    else if (stage === 1) x = edges[1] + gap + r + Math.floor(order / rows) * pitch;
    else {
      const share = (now - first) / Math.max(1e-9, (ended < 0 ? d.end_s : ended) - first);
      x = edges[2] + gap + r + share * (edges[3] - edges[2] - 2 * gap - 2 * r);
      y = y0 + Math.floor(((n * 0.618034) % 1) * rows) * pitch;
    }
    return { n, x: Math.max(edges[stage] + r, x), y, fill: counts[stage][2] };
  }).filter(Boolean);
  const isOut = d.outage && now >= d.outage[0] && now < d.outage[1];
  return h`<svg viewBox="0 0 ${width} ${high + 6}" role="img" aria-label=${`At ${seconds(now)}: ${d.waiting[i]} requests wait, ${d.prefill[i]} read their prompts, ${d.decode[i]} are answered`}>
    ${counts.map(([name, count, fill], k) => h`<g key=${name}>
      <rect x=${edges[k] + 2} y=${top - 4} width=${edges[k + 1] - edges[k] - 4} height=${high - top + 6} rx="7" fill=${`var(${fill})`} fill-opacity=".08" />
      <text x=${edges[k] + 8} y="14" class="muted">${name}</text>
      <text x=${edges[k] + 8} y="32" class="strong" font-size="16">${count}</text></g>`)}
    ${width > 640 && h`<text class="muted" x=${edges[3] - 6} y="14" text-anchor="end">from the first token to the last →</text>`}
    ${Array.from({ length: d.replicas }, (_, n) => n > 0 && h`<line key=${n} x1="4" x2=${width - 4} y1=${top + n * band - 1} y2=${top + n * band - 1} stroke=${n === d.readers ? "var(--muted)" : "var(--line)"} stroke-dasharray=${n === d.readers ? "none" : "2 4"} />`)}
    ${d.replicas > 1 && band >= 22 && Array.from({ length: d.replicas }, (_, n) => h`<text key=${`r${n}`} class="muted halo" font-size="10.5" x=${edges[0] + 7} y=${top + n * band + band - 8}>replica ${n + 1}${isOut && n === 0 ? ": lost" : d.readers ? (n < d.readers ? ": reads" : ": answers") : ""}</text>`)}
    ${isOut && h`<rect x=${edges[1]} y=${top - 2} width=${edges[3] - edges[1] - 4} height=${band - 2} rx="5" fill="var(--bad)" fill-opacity=".14" />`}
    ${dots.map((/** @type {any} */ dot) => h`<circle key=${dot.n} cx=${dot.x} cy=${dot.y} r=${r} fill=${`var(${dot.fill})`} style=${{ transition: "none" }} />`)}
  </svg>`;
}

/** Who waits, reads and is answered, and how full the cache is. @param {any} h @param {any} d @param {number} now @param {(when: number) => void} go @param {number} width */
function overTime(h, d, now, go, width) {
  const left = 34, right = width - 42, top = 22, bottom = 150;
  const layers = [["decode", "answer", "--compute"], ["prefill", "prompt", "--accent"], ["waiting", "waiting", "--waiting"]];
  const base = d.times.map(() => 0), stacked = layers.map(([name, word, fill]) => {
    const low = base.slice();
    d[name].forEach((/** @type {number} */ n, /** @type {number} */ i) => { base[i] += n; });
    return { name, word, fill, low, top: base.slice() };
  });
  const most = Math.max(1, ...base), x = linear([0, d.end_s], [left, right]), y = linear([0, most * 1.08], [bottom, top]);
  const area = (/** @type {any} */ one) => `M${d.times.map((/** @type {number} */ t, /** @type {number} */ i) => `${x(t)},${y(one.top[i])}`).join("L")}L${d.times.map((/** @type {number} */ t, /** @type {number} */ i) => `${x(t)},${y(one.low[i])}`).reverse().join("L")}Z`;
  const share = linear([0, 1], [bottom, top]);
  const pick = (/** @type {PointerEvent} */ event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = /** @type {Element} */ (event.currentTarget).getBoundingClientRect();
    go(Math.max(0, Math.min(d.end_s, x.invert(((event.clientX - box.x) / box.width) * width))));
  };
  let named = 0;
  return h`<svg viewBox="0 0 ${width} ${bottom + 24}" onPointerDown=${pick} onPointerMove=${pick} role="img" aria-label=${`Requests over ${seconds(d.end_s)}: at most ${Math.max(...d.waiting)} wait and ${Math.max(...d.decode)} are answered at once; the KV cache is at most ${number(100 * Math.max(...d.cache))} % full`}>
    ${width > 500 && h`<text class="strong" x="4" y="12" font-size="13">requests over time</text>`}
    ${layers.slice().reverse().map(([, word, fill]) => { const at = (width > 500 ? 150 : 4) + named; named += word.length * 6.6 + 26; return h`<g key=${word}><rect x=${at} y="3" width="10" height="10" rx="2" fill=${`var(${fill})`} /><text class="muted" x=${at + 14} y="12">${word}</text></g>`; })}
    <text x=${width - 2} y="12" text-anchor="end" fill="var(--kv)">KV cache</text>
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(3) })}
    ${axisX({ scale: x, y: bottom, top: bottom, ticks: x.ticks(width < 500 ? 4 : 8), format: (v) => (v ? seconds(v) : "0") })}
    ${d.outage && h`<rect x=${x(d.outage[0])} y=${top} width=${Math.max(1, x(d.outage[1]) - x(d.outage[0]))} height=${bottom - top} fill="var(--bad)" fill-opacity=".13" /><text class="halo" x=${x(d.outage[0]) + 4} y=${top + 12} fill="var(--bad)">replica 1 lost</text>`}
    ${stacked.map((one) => h`<path key=${one.name} d=${area(one)} fill=${`var(${one.fill})`} fill-opacity=".8" />`)}
    <path d=${`M${d.times.map((/** @type {number} */ t, /** @type {number} */ i) => `${x(t)},${share(d.cache[i])}`).join("L")}`} fill="none" stroke="var(--panel)" stroke-width="4" />
    <path d=${`M${d.times.map((/** @type {number} */ t, /** @type {number} */ i) => `${x(t)},${share(d.cache[i])}`).join("L")}`} fill="none" stroke="var(--kv)" stroke-width="2" />
    ${[0, 0.5, 1].map((v) => h`<text key=${v} x=${right + 6} y=${share(v) + 4} fill="var(--kv)">${100 * v} %</text>`)}
    <line x1=${x(now)} x2=${x(now)} y1=${top - 4} y2=${bottom} stroke="var(--text)" stroke-width="1.5" />
    <circle cx=${x(now)} cy=${bottom} r="5" fill="var(--text)" stroke="var(--panel)" />
  </svg>`;
}

/** Which share has its first token, and its whole answer, within a time. @param {any} h @param {any} d @param {number} width @param {number} high */
function spread(h, d, width, high) {
  const left = 40, right = width - 10, top = 30, bottom = high - 40;
  const all = [...d.ttft, ...d.e2e].filter((v) => v > 0);
  if (!all.length) return h`<text x="4" y="14">nobody was answered</text>`;
  const x = log([Math.min(...all) / 1.15, Math.max(...all, d.ttft_limit_s) * 1.15], [left, right]), y = linear([0, 1], [bottom, top]);
  const line = (/** @type {number[]} */ values) => values.map((v, i) => `${x(Math.max(v, 1e-4))},${y(i / Math.max(1, values.length - 1))}`).join(" ");
  const mark = (/** @type {number} */ share, /** @type {string} */ word) => { const v = quantile(d.e2e, share), isLeft = x(v) > left + 90; return h`<g key=${word}><circle cx=${x(v)} cy=${y(share)} r="4" fill="var(--compute)" stroke="var(--panel)" /><text class="halo" x=${x(v) + (isLeft ? -8 : 8)} y=${y(share) + (share > 0.9 ? 14 : 4)} text-anchor=${isLeft ? "end" : "start"} fill="var(--compute)">${word} ${seconds(v)}</text></g>`; };
  return h`<g>
    <text class="strong" x="4" y="14" font-size="13">within which time?</text>
    ${axisY({ scale: y, x: left, right, ticks: [0, 0.25, 0.5, 0.75, 1], format: (v) => `${100 * v} %` })}
    ${axisX({ scale: x, y: bottom, top: bottom, ticks: x.ticks(4), format: seconds, label: "from the arrival", end: right })}
    <line x1=${x(d.ttft_limit_s)} x2=${x(d.ttft_limit_s)} y1=${top} y2=${bottom} stroke="var(--muted)" stroke-dasharray="4 4" />
    <text class="muted halo" x=${x(d.ttft_limit_s)} y=${bottom - 6} text-anchor="middle">promised TTFT</text>
    <polyline points=${line(d.ttft)} fill="none" stroke="var(--accent)" stroke-width="2.2" />
    <polyline points=${line(d.e2e)} fill="none" stroke="var(--compute)" stroke-width="2.2" />
    <text class="halo" x=${Math.max(left + 4, x(quantile(d.ttft, 0.5)) - 8)} y=${y(0.72)} text-anchor=${x(quantile(d.ttft, 0.5)) > left + 80 ? "end" : "start"} fill="var(--accent)">first token</text>
    ${mark(0.5, "half")}${mark(0.99, "99 %")}
  </g>`;
}

/** What requests see at other rates, and where the queue begins to grow. @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width @param {number} high */
function byRate(h, d, inputs, act, width, high) {
  const left = 46, right = width - 10, top = 30, bottom = high - 40;
  const title = h`<text class="strong" x="4" y="14" font-size="13">at other rates: answered within</text>`;
  if (!d.rates.length) return h`<g>${title}<text class="muted" x=${width / 2} y=${high / 2} text-anchor="middle">other rates are being simulated…</text></g>`;
  const most = Math.max(inputs.rate, ...d.rates.map((/** @type {any} */ one) => one.rate)) * 1.04;
  const x = linear([0, most], [left, right]);
  const values = d.rates.flatMap((/** @type {any} */ one) => [one.p50_s, one.p99_s]), y = log([Math.min(...values) / 1.3, Math.max(...values) * 1.3], [bottom, top]);
  const pick = (/** @type {PointerEvent} */ event) => {
    const svg = /** @type {SVGElement} */ (event.currentTarget).closest("svg");
    if (!svg) return;
    const box = svg.getBoundingClientRect(), own = /** @type {SVGGElement} */ (event.currentTarget).getBoundingClientRect(), unit = box.width / Number(svg.getAttribute("viewBox")?.split(" ")[2]);
    const rate = x.invert((event.clientX - own.x) / unit);
    act({ rate: Math.max(0.1, Math.min(500, Number(rate.toPrecision(2)))) });
  };
  const line = (/** @type {string} */ name) => d.rates.map((/** @type {any} */ one) => `${x(one.rate)},${y(one[name])}`).join(" ");
  const last = d.rates[d.rates.length - 1], first = d.rates[0];
  const ticks = between(y.invert(bottom), y.invert(top));
  return h`<g onPointerUp=${pick} class="handle"><rect x="0" y="0" width=${width} height=${high - 4} fill="transparent" />
    ${title}
    ${axisY({ scale: y, x: left, right, ticks, format: seconds })}
    ${axisX({ scale: x, y: bottom, top: bottom, ticks: x.ticks(5), label: "requests/s", end: right })}
    ${d.capacity && h`<rect x=${x(d.capacity)} y=${top} width=${Math.max(0, right - x(d.capacity))} height=${bottom - top} fill="var(--bad)" fill-opacity=".1" />
      <line x1=${x(d.capacity)} x2=${x(d.capacity)} y1=${top} y2=${bottom} stroke="var(--bad)" stroke-width="1.5" stroke-dasharray="5 4" />
      <text class="halo" x=${x(d.capacity) - 5} y=${top + 2} text-anchor="end" fill="var(--bad)">gives way at ${number(d.capacity)}/s</text>`}
    <line x1=${x(inputs.rate)} x2=${x(inputs.rate)} y1=${top} y2=${bottom} stroke="var(--accent)" stroke-width="2" />
    <circle cx=${x(inputs.rate)} cy=${bottom} r="6" fill="var(--accent)" stroke="var(--panel)" />
    <polyline points=${line("p99_s")} fill="none" stroke="var(--compute)" stroke-width="2.2" stroke-dasharray="6 3" />
    <polyline points=${line("p50_s")} fill="none" stroke="var(--compute)" stroke-width="2.2" />
    ${d.rates.map((/** @type {any} */ one) => h`<g key=${one.rate}><title>${number(one.rate)} requests/s: half within ${seconds(one.p50_s)}, 99 % within ${seconds(one.p99_s)}; promise kept to ${number(100 * one.kept)} %</title>
      <circle cx=${x(one.rate)} cy=${y(one.p99_s)} r="3.2" fill="var(--compute)" stroke="var(--panel)" /><circle cx=${x(one.rate)} cy=${y(one.p50_s)} r="3.2" fill="var(--compute)" stroke="var(--panel)" /></g>`)}
    <text class="halo" x=${x(first.rate) + 2} y=${y(first.p50_s) + 17} fill="var(--compute)">half</text>
    <text class="halo" x=${x(first.rate) + 2} y=${y(first.p99_s) - 9} fill="var(--compute)">99 %</text>
    <title>Rates up to ${number(last.rate)} requests a second; click to choose one</title>
  </g>`;
}
