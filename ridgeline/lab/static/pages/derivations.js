// Which step is right, which mistake was made, and what is the next hint?

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act */
export function draw(h, answer, inputs, act) {
  const d = answer.drawing, count = d.steps.length;
  const answers = d.steps.map((/** @type {any} */ one) => (one.given === null ? "" : String(one.given)));
  const hints = of(inputs.hints, d.challenge, count);
  /** @param {string} field @param {string[]} values @param {number} at @param {string} value */
  const change = (field, values, at, value) => act({ [field]: `${d.challenge}:${values.map((old, i) => (i === at ? value : old)).join(",")}` });
  return h`<ol class="steps" aria-label=${d.challenge}>
    ${d.steps.map((/** @type {any} */ one, /** @type {number} */ i) => h`<li key=${`${d.challenge}${i}`} class=${one.verdict.replace(" ", "-")}>
      <label for=${`step-${i}`}>${one.ask}</label>
      <div class="typed">
        <input id=${`step-${i}`} type="text" inputmode="decimal" autocomplete="off" value=${answers[i]} aria-describedby=${`says-${i}`}
          onChange=${(/** @type {any} */ event) => change("answers", answers, i, event.target.value.trim().replace(",", "."))} />
        <span class="unit">${one.unit}</span>
        <span id=${`says-${i}`} class="verdict" role="status">${verdict(one)}</span>
        ${one.hints_left > 0 && one.verdict !== "right" && h`<button type="button" onClick=${() => change("hints", hints, i, String(Number(hints[i] || 0) + 1))}>${one.hints_left > 1 ? "hint" : "solution"}</button>`}
      </div>
      ${one.hints.map((/** @type {string} */ hint) => h`<p class="unit" key=${hint}>${hint}</p>`)}
      ${one.solution && h`<p class="formula">${one.solution}</p>`}
    </li>`)}
  </ol>`;
}

/** The values of this challenge's steps. @param {string} text @param {string} challenge @param {number} count */
function of(text, challenge, count) {
  const [owner, rest = ""] = text.split(":"), words = owner === challenge ? rest.split(",") : [];
  return Array.from({ length: count }, (_, i) => words[i] ?? "");
}

/** @param {any} one */
function verdict(one) {
  if (one.verdict === "right") return "✓ right";
  if (one.verdict === "well known") return `✗ known mistake: ${one.says}`;
  return one.verdict === "wrong" ? `✗ ${one.says}` : "";
}
