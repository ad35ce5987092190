// Which way do seven answers lead, to which plan, and where do other answers lead?
/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  return h`<div>${width < 700 ? list(h, d, act, width) : tree(h, d, act, width)}${leaf(h, d.leaf)}</div>`;
}

/** @param {any} act @param {string} field @param {string} name */
const press = (act, field, name) => ({
  role: "button", tabindex: 0,
  onClick: () => act({ [field]: name }),
  onKeyDown: (/** @type {KeyboardEvent} */ e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act({ [field]: name }); } },
});
const taken = (/** @type {any} */ branch) => branch.choices.find((/** @type {any} */ one) => one.is_taken);

/** A question a row, its answers side by side. @param {any} h @param {any} d @param {any} act @param {number} width */
function tree(h, d, act, width) {
  const left = 172, row = 66, box = 46, gap = 10, space = width - left;
  const middle = (/** @type {any} */ branch) => { const n = branch.choices.length, w = (space - gap * (n - 1)) / n; return left + branch.choices.indexOf(taken(branch)) * (w + gap) + w / 2; };
  const ways = d.branches.map((/** @type {any} */ b, /** @type {number} */ i) => {
    const x = middle(b), y = i * row, last = i + 1 === d.branches.length, to = last ? left + space / 2 : middle(d.branches[i + 1]);
    return `M${x},${y + box} C${x},${y + box + 14} ${to},${y + row - 10} ${to},${y + row + (last ? 6 : 0)}`;
  });
  return h`<svg viewBox="0 0 ${width} ${d.branches.length * row + 8}" role="group" aria-label="Questions from top to bottom; the taken answers lead to the plan below">
    <path d=${ways.join(" ")} fill="none" stroke="var(--accent)" stroke-width="4" stroke-linecap="round" />
    ${d.branches.map((/** @type {any} */ branch, /** @type {number} */ i) => {
      const n = branch.choices.length, w = (space - gap * (n - 1)) / n, y = i * row, own = taken(branch).device;
      return h`<g key=${branch.field}>
        <text x="0" y=${y + 27} class="strong">${branch.ask}</text>
        ${branch.choices.map((/** @type {any} */ one, /** @type {number} */ k) => {
          const x = left + k * (w + gap), flips = !one.is_taken && one.device !== own;
          const under = !one.price || w > 158 ? `${one.leads_to}${one.price && `, ${one.price}`}` : one.price;
          return h`<g key=${one.name} ...${press(act, branch.field, one.name)} aria-pressed=${one.is_taken} style="cursor:pointer">
            <rect x=${x} y=${y + 1} width=${w} height=${box - 2} rx="8" fill=${one.is_taken ? "var(--accent)" : "var(--panel)"} stroke=${one.is_taken ? "var(--accent)" : flips ? "var(--kv)" : "var(--line)"} stroke-width=${flips ? 1.8 : 1.2} />
            <text x=${x + w / 2} y=${y + 19} text-anchor="middle" class="strong" fill=${one.is_taken ? "var(--on-accent)" : "var(--text)"}>${one.name}</text>
            <text x=${x + w / 2} y=${y + 36} text-anchor="middle" fill=${one.is_taken ? "var(--on-accent)" : one.device ? "var(--muted)" : "var(--bad)"}>${under}</text>
          </g>`;
        })}</g>`;
    })}
  </svg>`;
}

/** The same as lines, for narrow places. @param {any} h @param {any} d @param {any} act @param {number} width */
function list(h, d, act, width) {
  const line = 25;
  let y = 0;
  const rows = d.branches.map((/** @type {any} */ branch) => { const top = y; y += 26 + branch.choices.length * line + 8; return { branch, top }; });
  const at = rows.map((/** @type {any} */ { branch, top }) => top + 26 + branch.choices.indexOf(taken(branch)) * line + line / 2 - 2);
  return h`<svg viewBox="0 0 ${width} ${y + 4}" role="group" aria-label="Questions from top to bottom; the taken answers lead to the plan below">
    <path d=${`M9,${at[0]} ${at.slice(1).map((/** @type {number} */ v) => `L9,${v}`).join(" ")} L9,${y + 4}`} stroke="var(--accent)" stroke-width="4" fill="none" />
    ${rows.map((/** @type {any} */ { branch, top }) => h`<g key=${branch.field}>
      <text x="22" y=${top + 17} class="halo strong">${branch.ask}</text>
      ${branch.choices.map((/** @type {any} */ one, /** @type {number} */ k) => { const v = top + 26 + k * line, flips = !one.is_taken && one.device !== taken(branch).device; return h`<g key=${one.name} ...${press(act, branch.field, one.name)} aria-pressed=${one.is_taken} style="cursor:pointer">
        <rect x="22" y=${v - 1} width=${width - 23} height=${line - 3} rx="5" fill=${one.is_taken ? "var(--accent)" : "transparent"} stroke=${flips ? "var(--kv)" : "var(--line)"} />
        <text x="29" y=${v + 14} fill=${one.is_taken ? "var(--on-accent)" : "var(--text)"}>${one.name}</text>
        <text x=${width - 8} y=${v + 14} text-anchor="end" fill=${one.is_taken ? "var(--on-accent)" : one.device ? "var(--muted)" : "var(--bad)"}>${!one.price || width > 430 ? `${one.leads_to}${one.price && `, ${one.price}`}` : one.price}</text>
      </g>`; })}</g>`)}
  </svg>`;
}

/** The plan, its command, and what would change it. @param {any} h @param {any} leaf */
function leaf(h, leaf) {
  const copy = (/** @type {any} */ event) => { const button = event.currentTarget; navigator.clipboard.writeText(leaf.command).then(() => { button.textContent = "copied"; }, () => { button.textContent = "select the text"; }); };
  return h`<div class="leaf">
    <h3>${leaf.title} ${leaf.dollars && h`<span class="unit">${leaf.dollars}</span>`}</h3>
    ${leaf.why_none && h`<p>${leaf.command || leaf.dollars ? `This version does not serve it: ${leaf.why_none}.` : leaf.why_none}</p>`}
    ${leaf.command && h`<div class="formula command"><code>${leaf.command}</code> <button type="button" onClick=${copy}>copy</button></div>`}
    ${leaf.others > 0 && h`<p class="unit">and ${leaf.others} more like it, each on a device and port of its own</p>`}
    ${leaf.command && h`<p class="unit">to refuse what would break the promise, add <code>${leaf.overload}</code></p>`}
    ${leaf.sensitivity.length > 0 && h`<div><b>What would flip it</b><ul>${leaf.sensitivity.map((/** @type {string} */ one) => h`<li key=${one}>${one}</li>`)}</ul></div>`}
    ${leaf.reasons.length > 0 && h`<details><summary>Why each part is as it is</summary><ul>${leaf.reasons.map((/** @type {string[]} */ one) => h`<li key=${one[0]}><b>${one[0]} ${one[1]}</b>: ${one[2]}</li>`)}</ul></details>`}
  </div>`;
}
