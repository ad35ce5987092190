// What is the engine doing now? Its steps under their limit, its cache, who waits and runs, and how long it takes.
import { useEffect, useRef, useState } from "preact/hooks";
import { Controls } from "./controls.js";
import { events, key, patient, reach } from "./api.js";
import { amount, both, number, scaled, seconds } from "./format.js";
import { html } from "./html.js";
import { Plot } from "./plot.js";
import { Stage } from "./stage.js";
import { axisX, axisY, log } from "./svg.js";

const KEPT_S = 60, MAX_POINTS = 240, CELLS = 400;
const PARTS = /** @type {[string, string, string][]} */ ([
  ["queue", "waited for its first step", "waiting"], ["own_prefill", "its own prompt", "compute"], ["others_prefill", "others' prompts", "communication"],
  ["decode", "decoding", "weights"], ["preemption", "preempted", "kv"], ["host", "between steps", "free"],
]);

/** The records of the last minute; asked again when the connection is lost. */
function useRecords() {
  const [now, setNow] = useState(/** @type {any} */ (null)), [state, setState] = useState(/** @type {any} */ (null)), [fault, setFault] = useState("");
  const past = useRef(/** @type {any[]} */ ([]));
  useEffect(() => {
    const leave = new AbortController();
    let timer = 0;
    const watch = async () => {
      try {
        setState(await (await reach("live/state", { signal: leave.signal })).json());
        const reply = await reach("live/steps", { signal: leave.signal });
        setFault("");
        for await (const data of events(reply)) {
          const record = { ...JSON.parse(data), at: performance.now() / 1e3 };
          past.current = [...past.current.filter((one) => record.at - one.at < KEPT_S), record];
          setNow(record);
        }
        throw new Error("The engine's server ended the connection; trying again.");
      } catch (error) {
        if (leave.signal.aborted) return;
        setFault(/** @type {Error} */ (error).message);
        timer = window.setTimeout(watch, 2000);
      }
    };
    watch();
    return () => { leave.abort(); clearTimeout(timer); };
  }, [key.value]);
  return { now, state, fault, past: past.current };
}

export function LiveView() {
  const { now, state, fault, past } = useRecords();
  useEffect(() => { document.title = "Live – Ridgeline lab"; }, []);
  const [chosen, setChosen] = useState("");
  const server = now?.server;
  return html`<main class="live">
    <header><h1>Live</h1><p class="idea">${state ? html`${state.model}${state.device && ` on ${state.device}`}` : "the engine of this server"}</p></header>
    ${fault && html`<p class="failed" role="alert">${fault}</p>`}
    ${!now && !fault && html`<p class="waiting" role="status">waiting for the first record…</p>`}
    ${server && html`<${Numbers} now=${now} past=${past} state=${state} />`}
    ${now && !server && html`<p class="idea">This key sees its own requests. Steps, cache and times of everybody are for keys that may read /metrics.</p>`}
    <div class="panels">
      ${server && html`<section class="panel wide"><h2>Steps under their limit</h2><${Stage}>${(/** @type {number} */ width) => html`<${Roof} past=${past} state=${state} width=${width} />`}<//></section>
        <section class="panel"><h2>KV cache</h2><${Stage}>${(/** @type {number} */ width) => html`<${Pool} gauges=${server.gauges} state=${state} width=${width} />`}<//></section>
        <section class="panel"><h2>Tokens per second</h2><${Stage}>${(/** @type {number} */ width) => html`<${Speed} past=${past} width=${width} />`}<//></section>
        <section class="panel"><h2>Latency of the last 5 s</h2><${Stage}>${(/** @type {number} */ width) => html`<${Latency} past=${past} width=${width} />`}<//></section>
        ${server.draft_tokens > 0 && html`<section class="panel"><h2>Drafts</h2><${Drafts} server=${server} /></section>`}
        <section class="panel"><h2>Memory contract</h2><${Memory} state=${state} used=${server.gauges.device_memory_used} /></section>
        <section class="panel wide"><h2>What if?</h2><${WhatIf} /></section>`}
      ${now && html`<section class="panel wide"><h2>Requests</h2><${Requests} requests=${now.requests} chosen=${chosen} choose=${setChosen} />
        ${chosen && html`<${Explain} id=${chosen} />`}</section>`}
    </div></main>`;
}

/** @param {{now: any, past: any[], state: any}} props */
function Numbers({ now, past, state }) {
  const { gauges, steps, num_output_tokens, num_requests, finished } = now.server;
  const hits = gauges.num_prefix_queried_tokens ? (100 * gauges.num_prefix_hit_tokens) / gauges.num_prefix_queried_tokens : 0;
  const speed = past.findLast((one) => one.server?.steps && now.at - one.at < 2)?.server.steps;
  const rows = [
    ["running", `${gauges.num_running} of ${state?.max_num_seqs ?? "–"}`, "sequences in the batch"], ["waiting", number(gauges.num_waiting), "sequences in the queue"],
    ["tokens/s", number(speed?.tokens_per_s ?? 0), "of all requests"], ["step", speed ? seconds(speed.measured_s) : "–", `expected ${speed ? seconds(speed.expected_s) : "–"}, at best ${speed ? seconds(speed.ideal_s) : "–"}`],
    ["requests", number(num_requests), `${Object.entries(finished).map(([name, num]) => `${num} ${name}`).join(", ")}`], ["tokens", number(num_output_tokens), "generated since the start"],
    ["steps", number(gauges.num_steps), "since the start"], ["prefix hits", `${number(hits)} %`, "of prompt tokens were in the cache"], ["preemptions", number(gauges.num_preemptions), "since the start"],
  ];
  return html`<dl class="numbers">${rows.map(([name, value, meaning]) => html`<div key=${name} title=${meaning}><dt>${name}</dt><dd data-name=${name}>${value}</dd></div>`)}</dl>`;
}

/** @param {{past: any[], state: any, width: number}} props */
function Roof({ past, state, width }) {
  const points = past.map((one) => ({ at: one.at, ...one.server?.steps })).filter((one) => one.intensity > 0).slice(-MAX_POINTS);
  if (!state?.peak_flops) return html`<p class="waiting">This engine does not price its steps.</p>`;
  if (!points.length) return html`<p class="waiting">No step yet. Send a request.</p>`;
  const height = Math.round(Math.max(230, Math.min(360, width * 0.45))), left = 46, right = width - 10, top = 14, bottom = height - 38;
  const ridge = state.peak_flops / state.bandwidth, last = points[points.length - 1];
  const x = log([Math.min(ridge / 300, ...points.map((p) => p.intensity)) / 1.5, Math.max(ridge * 4, ...points.map((p) => p.intensity)) * 1.5], [left, right]);
  const low = Math.min(x.invert(left) * state.bandwidth, ...points.map((p) => p.flops_per_s));
  const y = log([low / 1.5, state.peak_flops * 2], [bottom, top]);
  return html`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Roofline: the last step has ${number(last.intensity)} FLOP/B and reaches ${scaled(last.flops_per_s, "FLOP/s")}">
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(width < 560 ? 4 : 7), label: "FLOP for each byte", end: right })}
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(5), format: (v) => scaled(v, "").trim() })}
    <text class="muted" x=${left + 6} y=${top + 2}>FLOP/s</text>
    <path d="M${left},${y(x.invert(left) * state.bandwidth)} L${x(ridge)},${y(state.peak_flops)}" stroke="var(--waiting)" stroke-width="3" fill="none" />
    <path d="M${x(ridge)},${y(state.peak_flops)} L${right},${y(state.peak_flops)}" stroke="var(--compute)" stroke-width="3" fill="none" />
    <text class="halo" x=${right} y=${y(state.peak_flops) - 7} text-anchor="end" fill="var(--compute)">${scaled(state.peak_flops, "FLOP/s")} ${state.origin}</text>
    ${points.map((p, i) => html`<circle class="moving" key=${p.at} cx=${x(p.intensity)} cy=${y(p.flops_per_s)} r="4" fill="var(--accent)" fill-opacity=${0.08 + (0.5 * (i + 1)) / points.length} />`)}
    <circle cx=${x(last.intensity)} cy=${y(last.flops_per_s)} r="8" fill="var(--accent)" fill-opacity=".3" stroke="var(--accent)" stroke-width="2.5" />
    <text class="halo strong" fill="var(--accent)" x=${x(last.intensity) + 13} y=${y(last.flops_per_s) + 4}>${number(last.num_rows)} rows, ${seconds(last.measured_s)}</text>
  </svg>`;
}

/** @param {{gauges: any, state: any, width: number}} props */
function Pool({ gauges, state, width }) {
  const total = state?.num_blocks ?? 1, used = gauges.num_used_blocks, count = Math.min(CELLS, total);
  const columns = Math.max(10, Math.floor(width / 13)), size = width / columns, filled = Math.round((count * used) / total);
  const rows = Math.ceil(count / columns), each = total / count;
  return html`<svg viewBox="0 0 ${width} ${rows * size}" role="img" aria-label="${used} of ${total} blocks are used">
    ${Array.from({ length: count }, (_, i) => html`<rect key=${i} x=${(i % columns) * size + 1} y=${Math.floor(i / columns) * size + 1} width=${size - 2} height=${size - 2} rx="2" fill=${i < filled || (i === 0 && used > 0) ? "var(--kv)" : "var(--free)"} />`)}
  </svg><p class="note"><b>${number(used)}</b> of ${number(total)} blocks used (${number((100 * used) / total)} %), ${state?.block_size} tokens each${each > 1.01 ? `; a cell is ${number(each)} blocks` : ""}</p>`;
}

/** @param {any[]} past @param {((server: any) => number | null)[]} reads */
function series(past, reads) {
  const rows = past.filter((one) => one.server), end = rows[rows.length - 1]?.at ?? 0;
  return [rows.map((one) => one.at - end), ...reads.map((read) => rows.map((one) => read(one.server)))];
}

/** @param {{past: any[], width: number}} props */
function Speed({ past, width }) {
  const data = series(past, [(server) => server.steps?.tokens_per_s ?? (server.gauges.num_running ? null : 0)]);
  return html`<${Plot} data=${data} width=${width} label="tokens per second of the last minute" x=${(/** @type {number} */ v) => `${Math.round(v)} s`} lines=${[{ name: "tokens/s", colour: "accent", format: number }]} />`;
}

/** @param {{past: any[], width: number}} props */
function Latency({ past, width }) {
  const data = series(past, [(s) => s.first_token.p50_s, (s) => s.first_token.p99_s, (s) => s.between_tokens.p50_s, (s) => s.between_tokens.p99_s]);
  const lines = [{ name: "first token, median", colour: "compute" }, { name: "99 %", colour: "compute", dash: [4, 4] }, { name: "between tokens, median", colour: "kv" }, { name: "99 % ", colour: "kv", dash: [4, 4] }];
  return html`<${Plot} data=${data} width=${width} label="latencies of the last minute" x=${(/** @type {number} */ v) => `${Math.round(v)} s`} lines=${lines.map((one) => ({ ...one, format: seconds }))} />`;
}

/** @param {{server: any}} props */
function Drafts({ server }) {
  const share = server.accepted_tokens / server.draft_tokens;
  return html`<div class="bars">${server.accepted_by_position.map((/** @type {number} */ one, /** @type {number} */ i) => html`<div key=${i}><span>${i + 1}</span><meter min="0" max="1" value=${one} aria-label="position ${i + 1}"></meter><b>${number(100 * one)} %</b></div>`)}</div>
    <p class="note">${number(server.accepted_tokens)} of ${number(server.draft_tokens)} draft tokens were accepted (${number(100 * share)} %); above: by position</p>`;
}

/** @param {{state: any, used: number}} props */
function Memory({ state, used }) {
  const rows = [...(state?.memory ?? [])].sort((a, b) => b[1] - a[1]);
  return html`<table class="plain"><tbody>${rows.map(([what, size]) => html`<tr key=${what}><th scope="row">${what}</th><td class="number" title=${both(size, "B")}>${amount(size, "B")}</td></tr>`)}
    <tr><th scope="row">used on the device, by all</th><td class="number" title=${both(used, "B")}>${amount(used, "B")} of ${amount(state?.device_memory_total ?? 0, "B")}</td></tr></tbody></table>`;
}

/** @param {{requests: any[], chosen: string, choose: (id: string) => void}} props */
function Requests({ requests, chosen, choose }) {
  if (!requests.length && !chosen) return html`<p class="waiting">Nobody waits and nobody runs.</p>`;
  const longest = Math.max(1e-9, ...requests.map((one) => one.age_s));
  return html`<ul class="requests">${requests.map((one) => html`<li key=${one.id}><button type="button" aria-pressed=${one.id === chosen} onClick=${() => choose(one.id === chosen ? "" : one.id)}>
    <code>${one.id.slice(0, 12)}</code><span class="state ${one.is_running ? "running" : ""}">${one.is_running ? "runs" : "waits"}</span>
    <svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width=${(100 * one.waited_s) / longest} height="8" fill="var(--waiting)" /><rect x=${(100 * one.waited_s) / longest} width=${(100 * (one.age_s - one.waited_s)) / longest} height="8" fill="var(--compute)" /></svg>
    <span>${seconds(one.age_s)}</span><span>${number(one.num_prompt_tokens)} + ${number(one.num_tokens)} tokens</span></button></li>`)}</ul>`;
}

/** Where the time of one request went, as /explain has it. @param {{id: string}} props */
function Explain({ id }) {
  const [told, setTold] = useState(/** @type {any} */ (null)), [fault, setFault] = useState("");
  useEffect(() => {
    const leave = new AbortController();
    let timer = 0;
    const look = () => reach("/explain", { signal: leave.signal }).then(async (reply) => {
      const found = (await reply.json()).requests.filter((/** @type {any} */ one) => one.request_id.includes(id.replace(/^req-/, "")));
      if (found.length) setTold(found[0]); else setFault("Nothing is known of it yet.");
      if (!found.length || !found[0].end) timer = window.setTimeout(look, 2000);
    }).catch((error) => { if (!leave.signal.aborted) setFault(error.message); });
    setTold(null); setFault("");
    look();
    return () => { leave.abort(); clearTimeout(timer); };
  }, [id]);
  if (!told) return html`<p class="note" role="status">${fault || "explaining…"}</p>`;
  const parts = PARTS.map(([name, words, colour]) => ({ words, colour, s: told.parts[name] })).filter((one) => one.s > 0);
  let at = 0;
  return html`<div class="explain" role="status"><p>${told.end ? `Ended (${told.end})` : "Running"} after <b>${seconds(told.latency_s)}</b>; its own work alone would take ${seconds(told.floor.prefill_s + told.floor.decode_s)}.</p>
    <svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">${parts.map((one) => { const x = at; at += (100 * one.s) / told.latency_s; return html`<rect x=${x} width=${at - x} height="10" fill="var(--${one.colour})" />`; })}</svg>
    <ul class="legend">${parts.map((one) => html`<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" fill="var(--${one.colour})" /></svg> ${one.words} ${seconds(one.s)}</li>`)}</ul></div>`;
}

const FIGURES = /** @type {[string, string, (value: number) => string][]} */ ([
  ["first_token_p50_s", "first token, median", seconds], ["first_token_p99_s", "first token, 99 %", seconds],
  ["tokens_per_s", "tokens per second", number], ["largest_queue", "largest queue", number],
  ["num_cached_tokens", "prompt tokens found in the cache", number],
]);

/** The last minutes of traffic, replayed by the simulator under another setting. */
function WhatIf() {
  const [told, setTold] = useState(/** @type {any} */ (null)), [wanted, setWanted] = useState(/** @type {any} */ ({}));
  const [fault, setFault] = useState(""), [isBusy, setBusy] = useState(false);
  const replay = async () => {
    setBusy(true); setFault("");
    try {
      const reply = await patient("live/what-if", {
        method: "POST", body: JSON.stringify(wanted), signal: new AbortController().signal, headers: { "content-type": "application/json" },
      }, setFault);
      const found = await reply.json();
      setTold(found); setWanted(found.other); setFault("");
    } catch (error) { setFault(/** @type {Error} */ (error).message); }
    setBusy(false);
  };
  const cell = (/** @type {any} */ value, /** @type {(value: number) => string} */ write) => html`<td class="number">${value === null ? "–" : write(value)}</td>`;
  const inputs = told?.inputs.map((/** @type {any} */ one) => ({ ...one, default: told.setting[one.name] }));
  return html`${told && html`<${Controls} page=${{ inputs, presets: [] }} inputs=${wanted} act=${(/** @type {any} */ changes) => setWanted({ ...wanted, ...changes })} reset=${setWanted} />`}
    <p><button type="button" disabled=${isBusy} onClick=${replay}>${told ? "Replay again" : "Replay the last minutes"}</button></p>
    ${fault && html`<p class="failed" role="alert">${fault}</p>`}
    ${told && html`<p role="status">${told.sentence}</p>
      <table class="plain"><thead><tr><th></th><th scope="col">happened</th><th scope="col">replayed as it is</th><th scope="col">as you ask</th></tr></thead>
      <tbody>${FIGURES.map(([name, words, write]) => html`<tr key=${name}><th scope="row">${words}</th>${[told.measured, told.today, told.asked].map((seen) => cell(seen[name], write))}</tr>`)}</tbody></table>
      <p class="note">${number(told.num_requests)} requests that ended, simulated at ${number(told.scale)} times the price of each step, as this engine's steps took. Prompts that began alike do so again; the prefix cache is empty at first, and what a prompt found that began like none of these is left out of it.</p>`}`;
}
