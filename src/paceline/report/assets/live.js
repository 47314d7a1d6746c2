"use strict";
// `paceline watch`: loads the page again when the run has changed, and replaces the parts that differ. The scroll
// position, opened parts and the shown rollout stay.
(() => {
  const INTERVAL_MS = 1000;
  const byId = (id) => document.getElementById(id);
  let version = "";

  function say(text, isError = false) {
    byId("live").textContent = `${text} ${new Date().toLocaleTimeString()}`;
    byId("live").classList.toggle("error", isError);
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

  async function poll() {
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": version }, cache: "no-store" });
      if (answer.status === 200) {
        update(new DOMParser().parseFromString(await answer.text(), "text/html"));
        version = answer.headers.get("ETag");
        say("live, updated");
      } else if (answer.status !== 304) {
        say(`paceline watch answers ${answer.status}, open the address that it printed: since`, true);
      } else if (byId("live").classList.contains("error")) say("live, unchanged");
    } catch {
      if (!byId("live").classList.contains("error")) say("no answer, paceline watch has stopped: since", true);
    }
    setTimeout(poll, INTERVAL_MS);
  }
  poll();
})();
