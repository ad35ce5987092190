// What does the reader see? An index, or one page: inputs, its drawing, and the conclusion in figures.
import { render } from "preact";
import { useEffect, useErrorBoundary, useRef, useState } from "preact/hooks";
import { html } from "./html.js";
import { ask, key, needsKey, pages, pause, setKey, text } from "./api.js";
import { Controls } from "./controls.js";
import { LiveView } from "./live.js";
import { Stage } from "./stage.js";
import { Theme } from "./theme.js";
import { asCsv, asPng, Figures, Guess, Questions, save, Tables } from "./details.js";

const BETWEEN_MS = 100; // two questions at least, where the first has no answer yet: the server still works on what is given up

/** @param {any} page */
const defaults = (page) => Object.fromEntries(page.inputs.map((/** @type {any} */ one) => [one.name, one.default]));

/** The page's name and inputs that stand in the address. */
function address() {
  const [name, query] = location.hash.slice(1).split("?");
  return { name, given: new URLSearchParams(query ?? "") };
}

/** @param {any} page @param {URLSearchParams} given */
function fromAddress(page, given) {
  const inputs = defaults(page);
  for (const one of page.inputs) {
    const word = given.get(one.name);
    if (word === null) continue;
    try {
      inputs[one.name] = typeof one.default === "string" ? word : JSON.parse(word);
    } catch { /* a link that somebody cut: the default stands */ }
  }
  return inputs;
}

/** @param {any} page @param {any} inputs */
function toAddress(page, inputs) {
  const query = new URLSearchParams();
  for (const one of page.inputs) {
    const value = inputs[one.name], word = (/** @type {any} */ v) => (typeof one.default === "string" ? v : JSON.stringify(v));
    if (word(value) !== word(one.default)) query.set(one.name, word(value));
  }
  return `#${page.name}${query.size ? `?${query}` : ""}`;
}

/** The answer to the newest inputs; what is older and not answered yet is given up.
 * @param {any} page @param {any} inputs */
function useAnswer(page, inputs) {
  const [state, setState] = useState(/** @type {any} */ ({ busy: true, share: 0 }));
  const asked = useRef(-BETWEEN_MS);
  useEffect(() => {
    const leave = new AbortController(), early = state.busy ? asked.current + BETWEEN_MS - performance.now() : 0;
    const askNow = () => {
      asked.current = performance.now();
      return ask(page, inputs, leave.signal, (share) => tell({ share }), (answer) => tell({ answer, inputs, fault: undefined, wait: undefined }), (wait) => tell({ wait }));
    };
    setState((/** @type {any} */ old) => ({ ...old, busy: true, share: 0 }));
    const tell = (/** @type {any} */ news) => { if (!leave.signal.aborted) setState((/** @type {any} */ old) => ({ ...old, ...news })); };
    (early > 0 ? pause(early, leave.signal).then(askNow) : askNow())
      .then((answer) => { if (!leave.signal.aborted) setState({ answer, inputs, busy: false, share: 1 }); })
      .catch((fault) => { if (!leave.signal.aborted) setState((/** @type {any} */ old) => ({ ...old, busy: false, wait: undefined, fault: fault.message })); });
    return () => leave.abort();
  }, [page, JSON.stringify(inputs), key.value]);
  return state;
}

/** A number stays with its unit. @param {string} text */
const unbroken = (text) => text.replace(/(\d) us\b/g, "$1 µs").replace(/(\d) (?=\S)/g, "$1\u00a0");

/** A fault of a drawing is shown in its place. @param {{draw: any, state: any, act: any, width: number}} props */
function Drawing({ draw, state, act, width }) {
  const [fault] = useErrorBoundary((/** @type {any} */ error) => console.error(error));
  if (fault) return html`<p class="failed">This drawing failed: ${fault.message}</p>`;
  return draw(html, state.answer, state.inputs, act, width);
}

/** The pages before and behind this one, in the order in which one may read them. @param {{page: any, all: any[]}} props */
function Neighbours({ page, all }) {
  const at = all.indexOf(page), [before, behind] = [all[at - 1], all[at + 1]];
  return html`<nav class="neighbours" aria-label="neighbouring pages">
    ${before && html`<a href="#${before.name}">← ${before.title}</a>`}
    ${behind && html`<a href="#${behind.name}" class="next"><b>${behind.title} →</b><span>${behind.idea}</span></a>`}
  </nav>`;
}

/** @param {{page: any, given: URLSearchParams, all: any[]}} props */
function PageView({ page, given, all }) {
  const [inputs, setInputs] = useState(() => fromAddress(page, given));
  const [parts, setParts] = useState(/** @type {any} */ (null));
  const stage = useRef(/** @type {HTMLElement | null} */ (null));
  const state = useAnswer(page, inputs), { answer } = state;
  useEffect(() => {
    document.title = `${page.title} – Ridgeline lab`;
    import(`../pages/${page.name}.js`).then((module) => setParts(() => module.draw), (fault) => setParts(() => () => html`<p class="failed">${fault.message}</p>`));
  }, []);
  useEffect(() => history.replaceState(null, "", toAddress(page, inputs)), [inputs]);
  const act = (/** @type {any} */ changes) => setInputs((/** @type {any} */ old) => ({ ...old, ...changes }));
  const reset = (/** @type {any} */ changes) => setInputs({ ...defaults(page), ...changes });
  return html`<main class="page">
    <header><h1>${page.title}</h1><p class="idea">${page.idea}</p></header>
    <${Controls} ...${{ page, inputs, act, reset }} />
    <section class="stage" ref=${stage} aria-label="drawing and conclusion">
      <${Stage} class="drawing" busy=${state.busy}>${(/** @type {number} */ width) =>
        answer && parts ? html`<${Drawing} key=${page.name} draw=${parts} ...${{ state, act, width }} />`
        : state.fault ? "" : html`<div class="waiting" role="status">computing…</div>`}<//>
      ${state.busy && page.long && html`<progress value=${state.share} max="1" aria-label="progress"></progress>`}
      ${state.fault
        ? html`<p class="failed" role="alert">${state.fault} <button type="button" onClick=${() => reset({})}>reset the inputs</button></p>`
        : html`<p class="sentence" role="status">${state.wait ?? (answer && unbroken(answer.sentence))}</p>`}
      ${answer?.guess && html`<${Guess} key=${answer.guess.ask} guess=${answer.guess} />`}
    </section>
    ${answer && html`<${Details} ...${{ page, answer, stage, reset, all }} />`}
  </main>`;
}

/** @param {{page: any, answer: any, stage: any, reset: any, all: any[]}} props */
function Details({ page, answer, stage, reset, all }) {
  const [note, setNote] = useState("");
  const [words, setWords] = useState("");
  useEffect(() => { text(page.name).then(setWords, () => {}); }, []);
  const share = () => navigator.clipboard.writeText(location.href).then(() => setNote("copied"), () => setNote("copy the address of this page"));
  const csv = () => save(new Blob([asCsv(answer.tables)], { type: "text/csv" }), `${page.name}.csv`);
  const png = async () => save(await asPng(stage.current.querySelector(".drawing")), `${page.name}.png`);
  return html`<div class="details">
    <div class="tools" role="group" aria-label="take it with you">
      <button type="button" onClick=${share}>copy link</button>
      ${answer.tables.length > 0 && html`<button type="button" onClick=${csv}>CSV</button>`}
      <button type="button" onClick=${png}>PNG</button>
      <button type="button" onClick=${() => reset({})}>reset</button>
      <output>${note}</output>
    </div>
    <${Figures} figures=${answer.figures} />
    <${Tables} tables=${answer.tables} />
    <${Questions} questions=${answer.questions} />
    ${words && html`<article class="words" dangerouslySetInnerHTML=${{ __html: words }}></article>`}
    <${Neighbours} ...${{ page, all }} />
  </div>`;
}

/** @param {{all: any[], hasLive: boolean}} props */
function Index({ all, hasLive }) {
  useEffect(() => { document.title = "Ridgeline lab"; }, []);
  const live = { name: "live", title: "Live", group: "This engine", idea: "Steps under their limit, the cache, who waits and runs, and how long it takes." };
  return html`<main class="index">
    <header><h1>How inference works, on your machine</h1>
      <p class="idea">Each page computes with the code that prices, schedules and plans in the engine. Move something.</p></header>
    <div class="cards">${[...(hasLive ? [live] : []), ...all].map((page) => html`<a class="card" key=${page.name} href="#${page.name}">
      <p class="group">${page.group}</p><h2>${page.title}</h2><p>${page.idea}</p></a>`)}</div>
  </main>`;
}

/** Asked for where the server wants one. */
function KeyForm() {
  const submit = (/** @type {any} */ event) => { event.preventDefault(); setKey(event.target.elements.key.value.trim()); };
  return html`<main class="index"><form class="guess" onSubmit=${submit}>
    <label for="key"><b>This server wants an API key.</b> It stays in this tab.</label>
    <input id="key" name="key" type="password" autocomplete="off" /><button>use it</button>
  </form></main>`;
}

function Lab() {
  const [all, setAll] = useState(/** @type {any[] | null} */ (null)), [hasLive, setLive] = useState(false);
  const [fault, setFault] = useState("");
  const [at, setAt] = useState(address);
  useEffect(() => { pages().then((found) => { setAll(found.pages); setLive(found.live); setFault(""); }, (error) => setFault(error.message)); }, [key.value]);
  useEffect(() => {
    const look = () => { setAt(address()); scrollTo(0, 0); };
    addEventListener("hashchange", look);
    return () => removeEventListener("hashchange", look);
  }, []);
  const page = all?.find((one) => one.name === at.name);
  const body = needsKey.value ? html`<${KeyForm} />`
    : fault ? html`<main class="index"><p class="failed" role="alert">${fault}</p></main>`
    : all === null ? html`<main class="index"><p class="waiting" role="status">loading…</p></main>`
    : at.name === "live" && hasLive ? html`<${LiveView} />`
    : page ? html`<${PageView} key=${location.hash} page=${page} given=${at.given} all=${all} />` : html`<${Index} all=${all} hasLive=${hasLive} />`;
  return html`<nav class="top"><a href="#" class="home">Ridgeline lab</a>
    ${all && (page || at.name === "live") && html`<select aria-label="page" value=${at.name} onChange=${(/** @type {any} */ e) => { location.hash = e.target.value; }}>
      ${hasLive && html`<option value="live">Live</option>`}${all.map((one) => html`<option value=${one.name}>${one.title}</option>`)}</select>`}
    <${Theme} /></nav>${body}`;
}

render(html`<${Lab} />`, /** @type {Element} */ (document.getElementById("lab")));
