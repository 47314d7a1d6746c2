"use strict";
// Data is only inserted as text (textContent, Option's text), never as markup: model output is untrusted.
(() => {
  const byId = (id) => document.getElementById(id);
  const tip = byId("tip");

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Charts: the tooltip of the strip under the pointer, and a vertical line.

  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(x + 14, document.documentElement.clientWidth - box.width - 6);
    const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
    tip.style.transform = `translate(${Math.max(6, left)}px, ${Math.max(6, top)}px)`;
  }

  function hideTip() {
    tip.hidden = true;
    for (const line of document.querySelectorAll(".guide.on")) line.classList.remove("on");
  }

  function onPointer(event) {
    const strip = event.target.closest?.("[data-tip]");
    hideTip();
    if (!strip) return;
    showTip(strip.dataset.tip, event.clientX, event.clientY);
    const guide = strip.parentNode.querySelector(".guide");
    if (guide && strip.dataset.x) {
      guide.setAttribute("x1", strip.dataset.x);
      guide.setAttribute("x2", strip.dataset.x);
      guide.classList.add("on");
    }
  }
  for (const svg of document.querySelectorAll(".chart svg")) {
    svg.addEventListener("pointermove", onPointer);
    svg.addEventListener("pointerdown", onPointer);
    svg.addEventListener("pointerleave", hideTip);
  }
  addEventListener("scroll", hideTip, { passive: true });

  // Rollouts

  if (!byId("browser")) return;
  const data = JSON.parse(byId("data").textContent);
  const all = data.rollouts;
  const noReward = -Infinity; // a sample without a reward sorts last in both directions
  const reward = (r) => (typeof r.reward === "number" ? r.reward : noReward);
  const ORDERS = [
    () => all,
    () => [...all].sort((a, b) => reward(b) - reward(a)),
    () => [...all].sort((a, b) => (reward(a) === noReward) - (reward(b) === noReward) || reward(a) - reward(b)),
    () => all.filter((r) => r.failure),
    () => all.filter((r) => r.finish === "length"),
  ];
  const show = (x) => (typeof x !== "number" ? "–" : Number.isInteger(x) ? String(x) : x.toFixed(3));
  const unique = (values) => [...new Set(values)];
  let list = all;
  let position = Math.max(0, all.findIndex((r) => r.s === all[all.length - 1].s));

  function options(select, values, chosen, name) {
    select.replaceChildren(...values.map((v) => new Option(name ? name(v) : String(v), String(v), false, v === chosen)));
    select.disabled = values.length === 0;
  }

  function versionOf(rollout, index) {
    let end = 0;
    for (const [version, count] of rollout.versions) {
      end += count;
      if (index < end) return version;
    }
    return "–";
  }

  // The provenance of token i: its CSS class and a label.
  function provenanceOf(rollout, i) {
    if (rollout.mask && rollout.mask[i] === "0") return ["environment", "environment"];
    const drafter = rollout.drafters[Number(rollout.sources?.[i])] ?? "a drafter";
    switch (rollout.provenance?.[i]) {
      case "1": return [`drafted d${(Number(rollout.sources?.[i]) || 0) % 4}`, `accepted draft token of ${drafter}`];
      case "2": return ["corrected", `corrected token, in place of a draft token of ${drafter}`];
      case "3": return ["bonus", "bonus token, after a fully accepted draft"];
      case "0": return ["sampled", "sampled, no draft"];
      default: return ["unknown", "not recorded"];
    }
  }

  function describe(rollout, i) {
    const logprob = rollout.logprobs?.[i];
    const parts = [JSON.stringify(rollout.pieces[i]), `id ${rollout.ids[i]}`];
    if (typeof logprob === "number") parts.push(`logprob ${logprob.toFixed(4)} (p ${Math.exp(logprob).toFixed(3)})`);
    parts.push(`version ${versionOf(rollout, i)}`, provenanceOf(rollout, i)[1]);
    return parts.join("  ·  ");
  }

  function drawTokens(rollout) {
    const box = byId("tokens");
    const legend = byId("legend");
    legend.replaceChildren();
    if (!rollout.pieces) {
      box.replaceChildren(document.createTextNode(rollout.text));
      legend.append(make("li", "", "This record has no text per token, so nothing is coloured."));
      return;
    }
    const counts = new Map();
    const spans = rollout.pieces.map((piece, i) => {
      const [kind, label] = provenanceOf(rollout, i);
      const entry = counts.get(kind + label) ?? { kind, label, count: 0 };
      entry.count += 1;
      counts.set(kind + label, entry);
      const span = make("span", `t ${kind}`, piece);
      if (piece.includes("\n")) span.classList.add("newline");
      if (piece === "") span.classList.add("empty");
      span.dataset.i = i;
      return span;
    });
    box.replaceChildren(...spans);
    const total = spans.length || 1;
    for (const { kind, label, count } of [...counts.values()].sort((a, b) => b.count - a.count)) {
      const item = make("li");
      item.append(make("span", `t ${kind}`, " token "), `${label}: ${count} (${Math.round((100 * count) / total)}%)`);
      legend.append(item);
    }
  }

  function drawFacts(rollout) {
    const box = byId("sample-facts");
    const rewards = Object.entries(rollout.rewards);
    const rows = [["reward", show(rollout.reward)], ["advantage", show(rollout.advantage)]];
    if (rewards.length > 1) rows.push(["by function", rewards.map(([name, x]) => `${name} ${show(x)}`).join(", ")]);
    rows.push(["tokens", String(rollout.ids.length)], ["finish reason", rollout.finish || "–"]);
    if (rollout.turns > 1) rows.push(["turns", String(rollout.turns)]);
    if (rollout.problem) rows.push(["problem", rollout.problem]);
    rows.push(["versions", unique(rollout.versions.map((v) => v[0])).join(", ") || "–"]);
    if (rollout.failure) rows.push(["failure", rollout.failure]);
    box.replaceChildren(...rows.map(([name, value]) => {
      const row = make("div", name === "failure" ? "failure" : "");
      row.append(make("dt", "", name), make("dd", "", value));
      return row;
    }));
  }

  function drawSamples(rollout) {
    const group = all.filter((r) => r.s === rollout.s && r.g === rollout.g);
    byId("samples").replaceChildren(...group.map((r) => {
      const button = make("button");
      button.type = "button";
      button.append(make("small", "", `#${r.i}`), show(r.reward));
      button.title = r.failure ?? `sample ${r.i}, reward ${show(r.reward)}`;
      button.setAttribute("aria-pressed", String(r === rollout));
      button.addEventListener("click", () => go(r));
      return button;
    }));
  }

  function draw() {
    const rollout = list[position];
    byId("previous").disabled = position <= 0;
    byId("next").disabled = position >= list.length - 1;
    byId("place").textContent = rollout ? `${position + 1} of ${list.length}` : "no such sample";
    options(byId("step"), unique(list.map((r) => r.s)).sort((a, b) => a - b), rollout?.s);
    options(byId("group"), unique(list.filter((r) => r.s === rollout?.s).map((r) => r.g)).sort((a, b) => a - b), rollout?.g);
    byId("token-facts").textContent = "Point at a token, or tap it, for its figures.";
    if (!rollout) {
      for (const id of ["samples", "sample-facts", "prompt", "tokens", "legend"]) byId(id).replaceChildren();
      return;
    }
    drawSamples(rollout);
    drawFacts(rollout);
    byId("prompt").textContent = data.prompts[rollout.p];
    drawTokens(rollout);
  }

  // Shows this rollout. If the selected order does not include it, switches to the order that includes all.
  function go(rollout) {
    if (!rollout) return;
    if (!list.includes(rollout)) {
      byId("order").selectedIndex = 0;
      list = all;
    }
    position = list.indexOf(rollout);
    draw();
  }

  function move(by) {
    go(list[position + by]);
  }

  // Shows the first rollout, in the selected order, of the next or previous group or step.
  function jump(key, by) {
    const current = list[position];
    if (!current) return;
    const rank = (r) => (key === "s" ? r.s : r.s * 1e9 + r.g);
    const ranks = unique(list.map(rank)).sort((a, b) => a - b);
    const target = ranks[ranks.indexOf(rank(current)) + by];
    go(list.find((r) => rank(r) === target));
  }

  byId("order").addEventListener("change", (event) => {
    list = ORDERS[event.target.selectedIndex]();
    position = 0;
    draw();
  });
  byId("step").addEventListener("change", (event) => go(list.find((r) => String(r.s) === event.target.value)));
  byId("group").addEventListener("change", (event) => {
    const step = list[position].s;
    go(list.find((r) => r.s === step && String(r.g) === event.target.value));
  });
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target.closest?.("select, input, textarea, .scroll")) return;
    const box = byId("browser").getBoundingClientRect();
    if (box.bottom < 0 || box.top > innerHeight) return; // not visible: the keys scroll the page
    const by = { ArrowLeft: -1, ArrowRight: 1, "[": -1, "]": 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    if (event.key.startsWith("Arrow")) event.shiftKey ? jump("s", by) : move(by);
    else jump("g", by);
  });

  const showToken = (event) => {
    const span = event.target.closest?.("[data-i]");
    if (!span) return;
    for (const old of byId("tokens").querySelectorAll(".on")) old.classList.remove("on");
    span.classList.add("on");
    const text = describe(list[position], Number(span.dataset.i));
    byId("token-facts").textContent = text;
    showTip(text.split("  ·  ").join("\n"), event.clientX, event.clientY);
  };
  byId("tokens").addEventListener("pointerover", showToken);
  byId("tokens").addEventListener("click", showToken);
  byId("tokens").addEventListener("pointerleave", hideTip);
  draw();
})();
