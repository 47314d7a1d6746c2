"use strict";
// `paceline watch`: loads the page again when the run has changed, and replaces the parts that differ. The scroll
// position, opened parts and the shown rollout stay.
(() => {
  const INTERVAL_MS = 1000;
  const byId = (id) => document.getElementById(id);
  const REFUSED = "Refused (403). Open the address that `paceline watch` printed; if you forward the port, use the " +
    "same number on both sides"; // as the server says it
  let version = "";
  let problem = 0; // the status code of the last answer if it was an error, NO_ANSWER, or 0
  const NO_ANSWER = -1;

  function say(text, isError = false) {
    byId("live").textContent = text;
    byId("live").classList.toggle("error", isError);
  }

  function sayLive(text) {
    problem = 0;
    say(`live, ${text} ${new Date().toLocaleTimeString()}`);
  }

  function sayProblem(found) {
    if (found === problem) return; // the time is that of the first one
    problem = found;
    const since = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    if (found === NO_ANSWER) say(`paceline watch does not answer since ${since}`, true);
    else say(found === 403 ? REFUSED : `paceline watch answers ${found} since ${since}`, true);
  }

  // The first part that is visible below the navigation, and where it is.
  function anchor() {
    const parts = [...document.querySelectorAll("main > [id]")];
    const part = parts.find((p) => p.getBoundingClientRect().bottom > document.querySelector("nav").offsetHeight);
    return part && scrollY > 0 ? { id: part.id, top: part.getBoundingClientRect().top } : null;
  }

  function replacePart(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    const scrolled = [...old.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
    const opened = [...old.querySelectorAll("details")].map((details) => details.open);
    old.replaceWith(fresh);
    fresh.querySelectorAll("details").forEach((details, i) => { details.open = opened[i] ?? false; });
    fresh.querySelectorAll(".scroll, pre").forEach((box, i) => {
      if (scrolled[i]) [box.scrollLeft, box.scrollTop] = scrolled[i];
    });
  }

  function update(next) {
    const before = anchor();
    const main = document.querySelector("main");
    const data = next.getElementById("data").textContent;
    const parts = [...next.querySelector("main").children];
    const ids = new Set(parts.map((part) => part.id));
    for (const part of [...main.children]) if (!ids.has(part.id)) part.remove();
    let last = null; // the part before the next one
    for (const part of parts) {
      const old = byId(part.id);
      if (part.id === "rollouts" && old?.querySelector("#browser") && part.querySelector("#browser")) {
        old.querySelector("p").replaceWith(part.querySelector("p")); // only its note: the browser stays
        last = old;
      } else {
        if (old) replacePart(old, part);
        else if (last) last.after(part);
        else main.prepend(part);
        last = byId(part.id);
      }
    }
    for (const name of ["header", "nav"]) {
      const left = document.querySelector(name).scrollLeft;
      replacePart(document.querySelector(name), next.querySelector(name));
      document.querySelector(name).scrollLeft = left;
    }
    document.title = next.title;
    byId("tip").hidden = true;
    byId("data").textContent = data;
    document.dispatchEvent(new Event("paceline:data"));
    const after = before && byId(before.id);
    if (after) scrollBy({ top: after.getBoundingClientRect().top - before.top, behavior: "instant" });
  }

  async function load() {
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": version }, cache: "no-store" });
      return { status: answer.status, tag: answer.headers.get("ETag"), text: await answer.text() };
    } catch {
      return { status: NO_ANSWER };
    }
  }

  async function poll() {
    const { status, tag, text } = await load();
    setTimeout(poll, INTERVAL_MS); // before `update`: an error in it is shown in the console, and does not end this
    if (status === 200) {
      update(new DOMParser().parseFromString(text, "text/html"));
      version = tag;
      sayLive("updated");
    } else if (status !== 304) sayProblem(status);
    else if (problem) sayLive("unchanged");
  }
  poll();
})();
