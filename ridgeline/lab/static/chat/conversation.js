// How does an answer come? Token by token, until it ends, is stopped, or the connection is lost.
import { batch, signal } from "@preact/signals";
import { events, Failure, reach } from "lab/api.js";

/** @typedef {{token: string, logprob: number, top_logprobs: {token: string, logprob: number}[]}} Token */
/** @typedef {"running" | "stop" | "length" | "stopped" | "failed"} End */

/** One message; that of the assistant changes while it comes. */
export class Message {
  /** @param {string} role @param {string} text */
  constructor(role, text) {
    this.role = role;
    this.text = signal(text);
    this.tokens = signal(/** @type {Token[]} */ ([]));
    this.end = signal(/** @type {End} */ (role === "assistant" ? "running" : "stop"));
    this.fault = signal("");
    this.times = signal(/** @type {{first: number, whole: number, usage: any} | null} */ (null));
  }
}

/** @typedef {{system: string, temperature: number, top_p: number, top_k: number, min_p: number,
 *   repetition_penalty: number, max_tokens: number, seed: string, stop: string, logprobs: boolean}} Settings */

/** @type {Settings} */
export const DEFAULTS = {
  system: "", temperature: NaN, top_p: NaN, top_k: NaN, min_p: NaN, repetition_penalty: NaN,
  max_tokens: NaN, seed: "", stop: "", logprobs: false,
};

/** Only what somebody set is sent; the rest is the model's own.
 * @param {string} model @param {Message[]} messages @param {Settings} settings */
export function bodyOf(model, messages, settings) {
  const said = messages.filter((one) => one.text.value).map((one) => ({ role: one.role, content: one.text.value }));
  /** @type {Record<string, any>} */
  const body = {
    model, stream: true, stream_options: { include_usage: true },
    messages: settings.system ? [{ role: "system", content: settings.system }, ...said] : said,
  };
  for (const name of /** @type {(keyof Settings)[]} */ (["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"]))
    if (!Number.isNaN(settings[name])) body[name] = settings[name];
  if (settings.seed !== "") body.seed = Number(settings.seed);
  if (settings.stop !== "") body.stop = [settings.stop];
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/** Fill `answer` until its end. @param {Message} answer @param {object} body @param {AbortSignal} leave */
export async function stream(answer, body, leave) {
  const began = performance.now();
  let first = 0, usage = /** @type {any} */ (null), end = /** @type {End | null} */ (null);
  let text = "", tokens = /** @type {Token[]} */ ([]), frame = 0;
  const show = () => {
    frame = 0;
    batch(() => {
      answer.text.value += text;
      if (tokens.length) answer.tokens.value = [...answer.tokens.value, ...tokens];
    });
    text = ""; tokens = [];
  };
  try {
    const reply = await reach("/v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal: leave, headers: { "content-type": "application/json" },
    });
    for await (const data of events(reply)) {
      if (data === "[DONE]") break;
      const told = JSON.parse(data), choice = told.choices?.[0];
      if (told.error) throw new Failure(told.error.message);
      if (told.usage) usage = told.usage;
      if (choice?.finish_reason) end = choice.finish_reason;
      if (choice?.delta?.content) { first ||= performance.now() - began; text += choice.delta.content; }
      if (choice?.logprobs?.content) tokens.push(...choice.logprobs.content);
      frame ||= requestAnimationFrame(show);
    }
    if (end === null) throw new Failure("The connection was lost before the answer was whole.");
  } catch (fault) {
    end = leave.aborted ? "stopped" : "failed";
    if (!leave.aborted) answer.fault.value = fault instanceof Failure ? fault.message : "The connection was lost before the answer was whole.";
  } finally {
    cancelAnimationFrame(frame);
    show();
    batch(() => {
      answer.times.value = { first, whole: performance.now() - began, usage };
      answer.end.value = /** @type {End} */ (end);
    });
  }
}
