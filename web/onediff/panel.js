// @ts-check
/** The sidebar: graphs on disk and in memory, what they saved, what ran without acceleration. */

import { size, text } from "./texts.js";

const BUSY = 409; // the server is making a picture; what it says is for people

/**
 * @typedef {{key: string, family: string, sizes: string, variant: string, engine: string, used: number,
 *   disk_bytes: number | null, memory_bytes: number | null, compile_s: number, removable: boolean, calls: number,
 *   saved_s: number}} Graph
 * @typedef {{graphs: Graph[], eager: Record<string, number>, saved_s: number, compiling: boolean, folder: string,
 *   disk_bytes: number, disk_limit: number, memory_bytes: number, memory_limit: number}} Panel
 */

/**
 * Draw the sidebar into an element, and return what draws it anew.
 * @param {HTMLElement} container
 * @param {any} api ComfyUI's
 * @param {() => string} language
 * @param {(text: string, bad?: boolean) => void} say
 * @returns {() => Promise<void>}
 */
export function panel(container, api, language, say) {
  const root = document.createElement("div");
  root.className = "onediff-panel";
  container.replaceChildren(root);

  async function refresh() {
    try {
      const answer = await api.fetchApi("/onediff/panel");
      if (!answer.ok) throw new Error(String(answer.status));
      draw(await answer.json());
    } catch (error) {
      root.replaceChildren(element("p", text(language(), "failed", { reason: String(error) })));
    }
  }

  /** @param {string} path @param {object} body @param {(answer: any) => string} words */
  async function act(path, body, words) {
    try {
      const answer = await api.fetchApi(`/onediff/panel/${path}`, { method: "POST", body: JSON.stringify(body) });
      if (answer.status === BUSY) say((await answer.json()).error, true);
      else if (!answer.ok) throw new Error(String(answer.status));
      else say(words(await answer.json()));
    } catch (error) {
      say(text(language(), "failed", { reason: String(error) }), true);
    }
    await refresh();
  }

  /** @param {Panel} found */
  function draw(found) {
    const said = (/** @type {import("./texts.js").Key} */ key, /** @type {any} */ values = {}) =>
      text(language(), key, values);
    const removed = (/** @type {any} */ answer) => said("removed", { count: answer.removed });
    const head = element("header");
    head.append(
      element("strong", found.saved_s > 0 ? said("saved", { seconds: found.saved_s.toFixed(1) }) : said("notSaved")),
      element("span", said("disk", { used: size(found.disk_bytes), limit: size(found.disk_limit) })),
      element("span", said("memory", { used: size(found.memory_bytes), limit: size(found.memory_limit) })),
      element("small", found.folder),
    );
    const buttons = element("nav");
    buttons.append(
      button(said("refresh"), refresh),
      button(said("freeMemory"), () => act("free", {}, (answer) => said("freed", { bytes: size(answer.freed_bytes) }))),
      button(said("clear"), () => (confirm(said("clearSure")) ? act("clear", {}, removed) : undefined)),
    );
    root.replaceChildren(head, buttons);
    if (!found.graphs.length) root.append(element("p", said("none")));
    for (const [family, graphs] of byFamily(found.graphs)) {
      const section = element("section");
      const bytes = graphs.reduce((sum, graph) => sum + (graph.disk_bytes ?? 0), 0);
      section.append(element("h4", `${family} · ${size(bytes)}`));
      for (const graph of graphs) {
        const row = element("article");
        row.append(element("b", [graph.sizes, graph.variant].filter(Boolean).join(", ")), element("span", facts(graph, language(), said)));
        if (graph.removable) row.append(button(said("remove"), () => act("remove", { keys: [graph.key] }, removed)));
        section.append(row);
      }
      root.append(section);
    }
    const eager = element("section");
    eager.append(element("h4", said("eager")));
    const reasons = Object.entries(found.eager);
    if (!reasons.length) eager.append(element("p", said("nothingEager")));
    for (const [reason, count] of reasons) eager.append(element("p", said("times", { count, reason })));
    root.append(eager);
  }

  void refresh();
  return refresh;
}

/** @param {Graph[]} graphs @returns {Map<string, Graph[]>} in the order in which families were used */
export function byFamily(graphs) {
  /** @type {Map<string, Graph[]>} */
  const families = new Map();
  for (const graph of graphs) families.set(graph.family, [...(families.get(graph.family) ?? []), graph]);
  return families;
}

/** @param {Graph} graph @param {string} locale @param {(key: any, values?: any) => string} said @returns {string} */
function facts(graph, locale, said) {
  const when = new Date(graph.used * 1000).toLocaleString(locale);
  return [
    graph.engine,
    graph.disk_bytes === null ? "" : size(graph.disk_bytes),
    graph.memory_bytes === null ? "" : said("inMemory", { bytes: size(graph.memory_bytes) }),
    said("lastUsed", { when }),
    graph.calls ? said("calls", { count: graph.calls }) : "",
    graph.saved_s > 0 ? said("savedBy", { seconds: graph.saved_s.toFixed(1) }) : "",
    said("compiledIn", { seconds: graph.compile_s.toFixed(0) }),
  ]
    .filter(Boolean)
    .join(" · ");
}

/** @param {string} name @param {string} [content] @returns {HTMLElement} */
function element(name, content = "") {
  const made = document.createElement(name);
  made.textContent = content;
  return made;
}

/** @param {string} label @param {() => any} onclick @returns {HTMLElement} */
function button(label, onclick) {
  const made = element("button", label);
  made.onclick = onclick;
  return made;
}
