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
    if (event.target.closest?.("#tokens")) return; // shows its own
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
  // On the document: `paceline watch` replaces charts.
  document.addEventListener("pointermove", onPointer);
  document.addEventListener("pointerdown", onPointer);
  document.addEventListener("pointerleave", hideTip);
  addEventListener("scroll", hideTip, { passive: true });

  // Control characters become visible escapes: an override of the text direction would reorder the text after it.
  const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;
  function visible(text) {
    return String(text).replace(CONTROLS, (c) => {
      const code = c.charCodeAt(0);
      return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
    });
  }

  // Rollouts

  const noReward = -Infinity;
  const reward = (r) => (typeof r.reward === "number" ? r.reward : noReward);
  const FIGURES = { reward, length: (r) => r.ids.length, drafted: draftedShare };
  const FILTERS = {
    all: () => all,
    mixed: () => {
      const mixed = mixedGroups();
      return all.filter((r) => mixed.has(groupOf(r)));
    },
    failed: () => all.filter((r) => r.failure),
    truncated: () => all.filter((r) => ["length", "context", "budget"].includes(r.finish)),
  };
  const show = (x) => (typeof x !== "number" ? "–" : Number.isInteger(x) ? String(x) : x.toFixed(3));
  const percent = (x) => `${Math.round(100 * x)}%`;
  const unique = (values) => [...new Set(values)];
  const groupOf = (r) => `${r.s} ${r.g}`;
  const keyOf = (r) => `${r.s} ${r.g} ${r.i} ${r.b}`;
  const nameOf = (r) => r.b ? `${r.i}.${r.b}` : `${r.i}`; // sample, and branch if it is not the first
  let all = []; // by step, group, sample, branch
  let list = []; // the chosen ones, in the chosen order
  let position = 0;

  // The prompt is looked up at once: its index is another one after an update.
  function readData() {
    const data = JSON.parse(byId("data").textContent);
    return data.rollouts.map((r) => ({ ...r, prompt: data.prompts[r.p] }));
  }

  function draftCounts(r) {
    let tokens = 0;
    let drafted = 0;
    for (let i = 0; i < r.ids.length; i++) {
      if (r.mask && r.mask[i] === "0") continue; // the environment's
      tokens += 1;
      if (r.provenance?.[i] === "1") drafted += 1;
    }
    return { tokens, drafted };
  }

  function draftedShare(r) {
    const { tokens, drafted } = draftCounts(r);
    return tokens ? drafted / tokens : 0;
  }

  function mixedGroups() {
    const rewards = new Map();
    for (const r of all) {
      if (reward(r) === noReward) continue;
      if (!rewards.has(groupOf(r))) rewards.set(groupOf(r), new Set());
      rewards.get(groupOf(r)).add(r.reward);
    }
    return new Set([...rewards].filter(([, values]) => values.size > 1).map(([group]) => group));
  }

  // The sample to start with: of the latest step with one, that with the most accepted draft tokens from a group with
  // mixed rewards; else with any; else the last step's first sample.
  function opening() {
    const mixed = mixedGroups();
    const best = (samples) => {
      const last = samples.reduce((step, r) => Math.max(step, r.s), -Infinity);
      const ofLast = samples.filter((r) => r.s === last);
      return ofLast.reduce((a, b) => (a && draftedShare(a) >= draftedShare(b) ? a : b), undefined);
    };
    const drafted = all.filter((r) => draftedShare(r) > 0);
    const sample = best(drafted.filter((r) => mixed.has(groupOf(r)))) ?? best(drafted);
    return sample ?? all.find((r) => r.s === all[all.length - 1].s);
  }

  const completionOf = (r) => r.pieces?.join("") ?? r.text;
  const query = () => (byId("search").value.trim() ? byId("search").value.toLowerCase() : "");
  const hasText = (r, text) => {
    r.searched ??= `${r.prompt}\n\n${completionOf(r)}`.toLowerCase();
    return r.searched.includes(text);
  };

  // Positions of the search text.
  function hits(text) {
    const wanted = query();
    const lower = text.toLowerCase();
    const found = [];
    if (!wanted || lower.length !== text.length) return found; // lower case of another length has other positions
    for (let at = lower.indexOf(wanted); at >= 0 && found.length < 1000; at = lower.indexOf(wanted, at + wanted.length)) {
      found.push([at, at + wanted.length]);
    }
    return found;
  }

  function choose() {
    const wanted = query();
    const [name, direction] = byId("order").value.split("-");
    list = FILTERS[byId("filter").value]().filter((r) => !wanted || hasText(r, wanted));
    if (!direction) return;
    const values = new Map(list.map((r) => [r, FIGURES[name](r)]));
    const sign = direction === "up" ? 1 : -1;
    list.sort((a, b) => {
      const [x, y] = [values.get(a), values.get(b)];
      if ((x === noReward) !== (y === noReward)) return x === noReward ? 1 : -1; // without a reward: last
      return x === y ? 0 : sign * (x - y);
    });
  }

  function options(select, values, chosen) {
    const names = values.map(String);
    const old = [...select.options].map((o) => o.value);
    // Only what differs: an open list would close.
    if (names.length !== old.length || names.some((name, i) => name !== old[i])) {
      select.replaceChildren(...names.map((name) => new Option(name, name)));
    }
    select.value = String(chosen);
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
    const parts = [visible(JSON.stringify(rollout.pieces[i])), `id ${rollout.ids[i]}`];
    if (typeof logprob === "number") parts.push(`logprob ${logprob.toFixed(4)} (p ${Math.exp(logprob).toFixed(3)})`);
    parts.push(`version ${versionOf(rollout, i)}`, provenanceOf(rollout, i)[1]);
    return parts.join("  ·  ");
  }

  // Text with the search text marked.
  function drawText(box, text) {
    const parts = [];
    let end = 0;
    for (const [from, to] of hits(text)) {
      parts.push(visible(text.slice(end, from)), make("mark", "", visible(text.slice(from, to))));
      end = to;
    }
    box.replaceChildren(...parts, visible(text.slice(end)));
  }

  function drawTokens(rollout) {
    const box = byId("tokens");
    const legend = byId("legend");
    legend.replaceChildren();
    if (!rollout.pieces) {
      drawText(box, rollout.text);
      legend.append(make("li", "", "This record has no text per token, so nothing is coloured."));
      return;
    }
    const counts = new Map();
    const found = hits(completionOf(rollout));
    let [start, next] = [0, 0]; // of the token in the text; index of the first hit that ends behind it
    const spans = rollout.pieces.map((piece, i) => {
      const [kind, label] = provenanceOf(rollout, i);
      const entry = counts.get(kind + label) ?? { kind, label, count: 0 };
      entry.count += 1;
      counts.set(kind + label, entry);
      const span = make("span", `t ${kind}`, visible(piece));
      if (piece.includes("\n")) span.classList.add("newline");
      if (piece === "") span.classList.add("empty");
      while (next < found.length && found[next][1] <= start) next += 1;
      if (next < found.length && found[next][0] < start + piece.length) span.classList.add("hit");
      start += piece.length;
      span.dataset.i = i;
      return span;
    });
    box.replaceChildren(...spans);
    const total = spans.length || 1;
    for (const { kind, label, count } of [...counts.values()].sort((a, b) => b.count - a.count)) {
      const item = make("li");
      const name = make("span", "", `${visible(label)}: ${count} (${percent(count / total)})`);
      item.append(make("span", `t ${kind}`, " token "), name);
      legend.append(item);
    }
  }

  function drawFacts(rollout) {
    const rewards = Object.entries(rollout.rewards);
    const rows = [["reward", show(rollout.reward)], ["advantage", show(rollout.advantage)]];
    if (rewards.length > 1) rows.push(["by function", rewards.map(([name, x]) => `${name} ${show(x)}`).join(", ")]);
    rows.push(["tokens", String(rollout.ids.length)]);
    const { tokens, drafted } = draftCounts(rollout);
    if (rollout.provenance && tokens) rows.push(["drafted", `${drafted} of ${tokens} (${percent(drafted / tokens)})`]);
    rows.push(["finish reason", rollout.finish || "–"]);
    if (rollout.turns > 1) rows.push(["turns", String(rollout.turns)]);
    if (rollout.problem) rows.push(["problem", rollout.problem]);
    rows.push(["versions", unique(rollout.versions.map((v) => v[0])).join(", ") || "–"]);
    if (rollout.failure) rows.push(["failure", rollout.failure]);
    byId("sample-facts").replaceChildren(...rows.map(([name, value]) => {
      const row = make("div", name === "failure" ? "failure" : "");
      row.append(make("dt", "", name), make("dd", "", visible(value)));
      return row;
    }));
  }

  function drawSamples(rollout) {
    const group = all.filter((r) => groupOf(r) === groupOf(rollout));
    byId("samples").replaceChildren(...group.map((r) => {
      const button = make("button");
      button.type = "button";
      button.append(make("small", "", `#${nameOf(r)}`), show(r.reward));
      button.title = visible(r.failure ?? `sample ${nameOf(r)}, reward ${show(r.reward)}, drafted ${percent(draftedShare(r))}`);
      button.setAttribute("aria-pressed", String(r === rollout));
      button.addEventListener("click", () => go(r));
      return button;
    }));
  }

  // The controls, which depend on the whole list.
  function drawControls() {
    const rollout = list[position];
    byId("previous").disabled = position <= 0;
    byId("next").disabled = position >= list.length - 1;
    byId("place").textContent = rollout ? `${position + 1} of ${list.length}` : "no such sample";
    const numbers = (values) => unique(values).sort((a, b) => a - b);
    options(byId("step"), numbers(list.map((r) => r.s)), rollout?.s);
    options(byId("group"), numbers(list.filter((r) => r.s === rollout?.s).map((r) => r.g)), rollout?.g);
  }

  function draw() {
    drawControls();
    const rollout = list[position];
    byId("token-facts").textContent = rollout ? "Point at a token, or tap it, for its figures." : "";
    if (!rollout) {
      for (const id of ["samples", "sample-facts", "prompt", "tokens", "legend"]) byId(id).replaceChildren();
      return;
    }
    drawSamples(rollout);
    drawFacts(rollout);
    drawText(byId("prompt"), rollout.prompt);
    drawTokens(rollout);
    for (const [box, mark] of [["prompt", "mark"], ["tokens", ".hit"]]) {
      const first = byId(box).querySelector(mark);
      byId(box).scrollTop = first ? first.offsetTop - byId(box).offsetTop - 40 : 0;
    }
  }

  // Shows this rollout. If the choice does not include it, all samples are shown, in the same order.
  function go(rollout) {
    if (!rollout) return;
    if (!list.includes(rollout)) {
      byId("filter").value = "all";
      byId("search").value = "";
      choose();
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

  // After a change of the choice: stays at the shown sample if it is still in the list and the order is by step.
  function rechoose(stays) {
    const current = list[position];
    choose();
    position = stays ? Math.max(0, list.indexOf(current)) : 0;
    draw();
  }

  function onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target.closest?.("select, input, textarea, .scroll")) return;
    const box = byId("browser").getBoundingClientRect();
    if (box.bottom < 0 || box.top > innerHeight) return; // not visible: the keys scroll the page
    const by = { ArrowLeft: -1, ArrowRight: 1, "[": -1, "]": 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    if (event.key.startsWith("Arrow")) event.shiftKey ? jump("s", by) : move(by);
    else jump("g", by);
  }

  function showToken(event) {
    const span = event.target.closest?.("[data-i]");
    if (!span) return;
    for (const old of byId("tokens").querySelectorAll(".on")) old.classList.remove("on");
    span.classList.add("on");
    const text = describe(list[position], Number(span.dataset.i));
    byId("token-facts").textContent = text;
    showTip(text.split("  ·  ").join("\n"), event.clientX, event.clientY);
  }

  function start() {
    all = readData();
    byId("search").addEventListener("input", () => rechoose(true));
    byId("filter").addEventListener("change", () => rechoose(false));
    byId("order").addEventListener("change", () => rechoose(false));
    byId("step").addEventListener("change", (event) => go(list.find((r) => String(r.s) === event.target.value)));
    byId("group").addEventListener("change", (event) => {
      const step = list[position].s;
      go(list.find((r) => r.s === step && String(r.g) === event.target.value));
    });
    byId("previous").addEventListener("click", () => move(-1));
    byId("next").addEventListener("click", () => move(1));
    byId("tokens").addEventListener("pointerover", showToken);
    byId("tokens").addEventListener("click", showToken);
    byId("tokens").addEventListener("pointerleave", hideTip);
    addEventListener("keydown", onKey);
    choose();
    go(opening());
  }

  // `paceline watch` has put new data into the page. The shown sample stays, even if the page has no more room for it.
  function update() {
    if (!all.length) {
      if (byId("browser")) start();
      return;
    }
    const shown = list[position];
    const fresh = readData();
    const at = fresh.findIndex((r) => shown && keyOf(r) === keyOf(shown));
    const isSame = at >= 0 && JSON.stringify(fresh[at].ids) === JSON.stringify(shown.ids);
    all = fresh;
    if (shown && at < 0) all = [...fresh, shown].sort((a, b) => a.s - b.s || a.g - b.g || a.i - b.i);
    choose();
    const current = at >= 0 ? fresh[at] : shown;
    position = Math.max(0, list.indexOf(current));
    if (current && list[position] === current && (isSame || at < 0)) {
      drawControls();
      drawSamples(current);
    } else draw();
  }

  if (byId("browser")) start();
  document.addEventListener("paceline:data", update);
})();
