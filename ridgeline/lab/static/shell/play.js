// How does a drawing move on by itself? Buttons that step an input, and play its steps until somebody stops them.
import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "./html.js";

/** @param {{at: number, last: number, go: (at: number) => void, by?: number, ms?: number, what?: string}} props */
export function Play({ at, last, go, by = 1, ms = 900, what = "step" }) {
  const [plays, setPlays] = useState(false);
  const newest = useRef({ at, go });
  newest.current = { at, go };
  useEffect(() => {
    if (!plays) return undefined;
    const timer = setInterval(() => {
      const { at: now, go: on } = newest.current;
      if (now >= last) setPlays(false);
      else on(Math.min(last, now + by));
    }, ms);
    return () => clearInterval(timer);
  }, [plays, last, by, ms]);
  const toggle = () => { if (!plays && at >= last) go(0); setPlays(!plays); };
  const to = (/** @type {number} */ value) => { setPlays(false); go(Math.max(0, Math.min(last, value))); };
  return html`<div class="tools play" role="group" aria-label=${`${what} by ${what}`}>
    <button type="button" onClick=${() => to(at - by)} disabled=${at <= 0} aria-label=${`one ${what} back`}>‹</button>
    <button type="button" onClick=${toggle} aria-pressed=${plays}>${plays ? "stop" : "play"}</button>
    <button type="button" onClick=${() => to(at + by)} disabled=${at >= last} aria-label=${`one ${what} on`}>›</button>
  </div>`;
}
