// What does somebody who talks to the model see? The conversation, its settings, and what each answer took.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { html } from "lab/html.js";
import { key, needsKey, reach, setKey } from "lab/api.js";
import { number, seconds } from "lab/format.js";
import { Theme } from "lab/theme.js";
import { bodyOf, DEFAULTS, Message, stream } from "./conversation.js";

const NUMBERS = /** @type {const} */ ([
  ["temperature", 0, 2, 0.1, "0 is always the likeliest token"], ["top_p", 0.01, 1, 0.05, "among tokens that together have this probability"],
  ["top_k", 0, 1000, 1, "among so many of the likeliest tokens; 0: all"], ["min_p", 0, 1, 0.01, "at least this share of the likeliest one's probability"],
  ["repetition_penalty", 0.5, 2, 0.05, "above 1: less of what was said"], ["max_tokens", 1, 1048576, 1, "the longest answer"],
]);
const ENDS = /** @type {Record<string, string>} */ ({ length: "the limit of tokens", stopped: "stopped", failed: "broke off" });

/** A text with its blocks of code. @param {{text: string}} props */
function Text({ text }) {
  return text.split("```").map((part, i) => {
    if (i % 2 === 0) return part && html`<span>${part}</span>`;
    const end = part.indexOf("\n");
    return html`<pre><code>${end < 0 ? part : part.slice(end + 1)}</code></pre>`;
  });
}

/** Each token by its probability; what else could have stood there on hover or focus. @param {{tokens: any[]}} props */
function Tokens({ tokens }) {
  const [at, setAt] = useState(-1);
  const one = tokens[at];
  const keys = (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { setAt(Math.min(tokens.length - 1, Math.max(0, at + step))); event.preventDefault(); }
  };
  return html`<span class="tokens" tabindex="0" role="group" aria-label="tokens with their probabilities; arrow keys move" onKeyDown=${keys} onMouseLeave=${() => setAt(-1)} onBlur=${() => setAt(-1)}>
    ${tokens.map((each, i) => html`<span key=${i} class="token p${Math.min(9, Math.floor(10 * Math.exp(each.logprob)))} ${i === at ? "at" : ""}" onMouseEnter=${() => setAt(i)}>${each.token}</span>`)}
  </span>
  <span class="likely" role="status">${one && [one, ...one.top_logprobs.filter((/** @type {any} */ other) => other.token !== one.token)].map((/** @type {any} */ each, i) => html`
    <span class=${i === 0 ? "chosen" : ""}><code>${JSON.stringify(each.token).slice(1, -1)}</code> ${number(100 * Math.exp(each.logprob))} %</span>`)}</span>`;
}

/** @param {{message: Message, again: (() => void) | null}} props */
function Bubble({ message, again }) {
  const { role } = message, text = message.text.value, tokens = message.tokens.value, end = message.end.value;
  return html`<article class="message ${role}" aria-label=${role === "user" ? "you" : "the model"}>
    <div class="text">${tokens.length ? html`<${Tokens} tokens=${tokens} />` : html`<${Text} text=${text} />`}${end === "running" && html`<span class="cursor" aria-label="answering"></span>`}</div>
    ${message.fault.value && html`<p class="failed" role="alert">${message.fault.value}</p>`}
    ${role === "assistant" && end !== "running" && html`<footer>
      <${Took} message=${message} />
      ${text && html`<button type="button" onClick=${() => navigator.clipboard.writeText(text)}>copy</button>`}
      ${again && html`<button type="button" onClick=${again}>${end === "failed" ? "try again" : "another answer"}</button>`}
    </footer>`}
  </article>`;
}

/** The times of an answer. @param {{message: Message}} props */
function Took({ message }) {
  const times = message.times.value, said = [];
  if (!times) return null;
  const { first, whole, usage } = times, num = usage?.completion_tokens;
  if (ENDS[message.end.value]) said.push(html`<b>${ENDS[message.end.value]}</b>`);
  if (first) said.push(html`<span title="time to the first token, as seen here">first token ${seconds(first / 1e3)}</span>`);
  if (num) said.push(html`<span>${num} tokens</span>`);
  if (num > 1 && whole > first) said.push(html`<span title="after the first token, as seen here">${number((num - 1) / ((whole - first) / 1e3))} tok/s</span>`);
  said.push(html`<span title="from question to end">${seconds(whole / 1e3)}</span>`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) said.push(html`<span>prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}</span>`);
  return html`<span class="took">${said}</span>`;
}

/** @param {{settings: any, set: (changes: any) => void}} props */
function Settings({ settings, set }) {
  return html`<div class="inputs">
    <div class="control text"><label for="system">system prompt</label>
      <textarea id="system" rows="4" value=${settings.system} onInput=${(/** @type {any} */ e) => set({ system: e.target.value })}></textarea></div>
    ${NUMBERS.map(([name, low, high, step, meaning]) => html`<div class="control" key=${name}>
      <label for=${name} title=${meaning}>${name.replaceAll("_", " ")}</label>
      <input id=${name} type="number" min=${low} max=${high} step=${step} placeholder="model's" value=${Number.isNaN(settings[name]) ? "" : settings[name]}
        onInput=${(/** @type {any} */ e) => set({ [name]: e.target.value === "" ? NaN : +e.target.value })} /></div>`)}
    <div class="control"><label for="seed" title="the same seed gives the same answer">seed</label>
      <input id="seed" type="number" step="1" placeholder="any" value=${settings.seed} onInput=${(/** @type {any} */ e) => set({ seed: e.target.value })} /></div>
    <div class="control"><label for="stop" title="the answer ends before it">stop at</label>
      <input id="stop" type="text" maxlength="256" value=${settings.stop} onInput=${(/** @type {any} */ e) => set({ stop: e.target.value })} /></div>
    <div class="control switch"><label><input type="checkbox" role="switch" checked=${settings.logprobs} onChange=${(/** @type {any} */ e) => set({ logprobs: e.target.checked })} /> show probabilities</label></div>
    <button type="button" class="quiet" onClick=${() => set(DEFAULTS)}>the model's own settings</button>
  </div>`;
}

/** The name of the model; asked again while it is being loaded. */
function useModel() {
  const [model, setModel] = useState(/** @type {{id?: string, max_model_len?: number, fault?: string}} */ ({}));
  useEffect(() => {
    let timer = 0;
    const look = () => reach("/v1/models").then(async (reply) => setModel((await reply.json()).data[0]), (fault) => {
      setModel({ fault: fault.message });
      if (!needsKey.value) timer = window.setTimeout(look, 2000);
    });
    look();
    return () => clearTimeout(timer);
  }, [key.value]);
  return model;
}

function Chat() {
  const model = useModel(), [settings, setSettings] = useState(DEFAULTS);
  const messages = useSignal(/** @type {Message[]} */ ([])), running = useSignal(/** @type {AbortController | null} */ (null));
  const log = useRef(/** @type {HTMLElement | null} */ (null)), field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const send = async (/** @type {Message[]} */ before) => {
    const answer = new Message("assistant", ""), leave = new AbortController();
    messages.value = [...before, answer];
    running.value = leave;
    await stream(answer, bodyOf(model.id ?? "", before, settings), leave.signal);
    running.value = null;
    field.current?.focus();
  };
  const ask = (/** @type {Event} */ event) => {
    event.preventDefault();
    const area = /** @type {HTMLTextAreaElement} */ (field.current), text = area.value.trim();
    if (!text || running.value || !model.id) return;
    area.value = "";
    send([...messages.value, new Message("user", text)]);
  };
  const stop = () => running.value?.abort();
  useEffect(() => {
    const onKey = (/** @type {KeyboardEvent} */ event) => { if (event.key === "Escape") stop(); };
    addEventListener("keydown", onKey);
    const element = /** @type {HTMLElement} */ (log.current);
    let near = true;  // whoever has scrolled up reads on in peace
    const onScroll = () => { near = element.scrollHeight - element.scrollTop - element.clientHeight < 60; };
    const watch = new MutationObserver(() => { if (near) element.scrollTop = element.scrollHeight; });
    element.addEventListener("scroll", onScroll);
    watch.observe(element, { childList: true, subtree: true, characterData: true });
    field.current?.focus();
    return () => { removeEventListener("keydown", onKey); watch.disconnect(); };
  }, []);
  const onEnter = (/** @type {KeyboardEvent} */ event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event); };
  const all = messages.value, set = (/** @type {any} */ changes) => setSettings({ ...settings, ...changes });
  return html`<nav class="top"><span class="home">Ridgeline</span>
      <span class="model" role="status">${model.id ?? model.fault ?? "…"}</span>
      ${all.length > 0 && html`<button type="button" class="theme" onClick=${() => { stop(); messages.value = []; field.current?.focus(); }}>new chat</button>`}<${Theme} /></nav>
    <main class="chat">
      <div class="log" role="log" aria-live="off" tabindex="0" aria-label="conversation" ref=${log}>
        ${all.length === 0 && html`<div class="empty"><h1>${model.id ?? "Ridgeline"}</h1><p>Enter sends, Shift+Enter begins a line, Esc stops. Nothing leaves this server, and nothing is kept.</p></div>`}
        ${all.map((message, i) => html`<${Bubble} key=${i} message=${message} again=${i === all.length - 1 && message.role === "assistant" && !running.value ? () => send(all.slice(0, -1)) : null} />`)}
      </div>
      <details class="settings"><summary>settings</summary><${Settings} settings=${settings} set=${set} /></details>
      ${needsKey.value && html`<${KeyForm} />`}
      <form class="ask" onSubmit=${ask}>
        <textarea ref=${field} rows="2" aria-label="message" placeholder="Say something" onKeyDown=${onEnter}></textarea>
        ${running.value ? html`<button type="button" class="main" onClick=${stop}>stop</button>` : html`<button class="main" disabled=${!model.id}>send</button>`}
      </form>
    </main>`;
}

function KeyForm() {
  const submit = (/** @type {any} */ event) => { event.preventDefault(); setKey(event.target.elements.key.value.trim()); };
  return html`<form class="guess" onSubmit=${submit}><label for="key">This server wants an API key. It stays in this tab.</label>
    <input id="key" name="key" type="password" autocomplete="off" /><button>use it</button></form>`;
}

render(html`<${Chat} />`, /** @type {Element} */ (document.getElementById("chat")));
