// How wide may a drawing be? Its frame, which tells it.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "./html.js";

/** @param {{children: (width: number) => any, busy?: boolean, class?: string}} props */
export function Stage({ children, busy = false, class: name = "" }) {
  const frame = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = /** @type {HTMLDivElement} */ (frame.current);
    const look = () => {
      const style = getComputedStyle(element);
      setWidth(Math.round(element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
    };
    const watch = new ResizeObserver(look);
    look();
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  return html`<div ref=${frame} class="drawn ${name}" aria-busy=${busy}>${width > 0 && children(width)}</div>`;
}
