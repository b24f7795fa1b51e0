// @ts-check
/** OneDiff in ComfyUI's editor: progress on nodes, a sidebar, settings. Loaded by the editor as it is; nothing is built. */

// @ts-ignore the editor's
import { api } from "../../scripts/api.js";
// @ts-ignore the editor's
import { app } from "../../scripts/app.js";

import { panel } from "./onediff/panel.js";
import { withoutOldNodes } from "./onediff/old_workflows.js";
import { backgroundEnded, drawBar, runEnded, show, underWay } from "./onediff/status.js";
import { STYLE } from "./onediff/style.js";
import { text } from "./onediff/texts.js";

const OURS = "OneDiff"; // how the types of our nodes begin
const TICK_MS = 500;
const POLL_MS = 3000;
const DEFAULTS = { engine: "OneDiff.Engine", compile: "OneDiff.Compile" };

/** @param {string} id @returns {any} */
const setting = (id) => app.extensionManager.setting.get(id);

/** @returns {string} */
const language = () => setting("Comfy.Locale") ?? "en";

/** @param {string} type @returns {boolean} whether the editor has such nodes */
// @ts-ignore the editor's
const isKnown = (type) => type in LiteGraph.registered_node_types;

/** @param {string} path @returns {Promise<any>} what the server answers, {} if it has no answer */
async function answerOf(path) {
  const answer = await api.fetchApi(path).catch(() => null);
  return answer?.ok ? answer.json() : {};
}

/** @param {string} detail @param {boolean} [bad] */
function say(detail, bad = false) {
  app.extensionManager.toast.add({ severity: bad ? "error" : "info", summary: "OneDiff", detail, life: 6000 });
}

/** @type {ReturnType<typeof setInterval> | undefined} */
let asking;

/** Ask the server from time to time, until no other process compiles any more; then say so. */
function followBackground() {
  asking ??= setInterval(async () => {
    const answer = await api.fetchApi("/onediff/report").catch(() => null);
    if (!answer?.ok || (await answer.json()).background) return;
    clearInterval(asking);
    asking = undefined;
    backgroundEnded();
    app.canvas.setDirty(true, true);
    say(text(language(), "done"));
  }, POLL_MS);
}

/**
 * Give a node the height that it needs. Replace All gives it the size of the node that it takes the place of; what a
 * workflow says, when one is opened, stays.
 * @param {any} node one that was just made
 */
function keepProperSize(node) {
  let opened = false;
  const before = node.onConfigure;
  node.onConfigure = function (/** @type {any[]} */ ...given) {
    opened = true;
    return before?.apply(this, given);
  };
  setTimeout(() => {
    if (opened) return;
    const [width, height] = node.computeSize();
    if (node.size[1] !== height || node.size[0] < width) node.setSize([Math.max(node.size[0], width), height]);
  });
}

/** @type {() => Promise<void>} */
let refreshPanel = async () => {};

app.registerExtension({
  name: "onediff.comfy",

  settings: [
    {
      id: DEFAULTS.engine,
      category: ["OneDiff", "New nodes", "Engine"],
      name: "Engine for new nodes",
      type: "combo",
      options: ["auto", "inductor", "oneflow", "cudagraph", "eager"],
      defaultValue: "auto",
    },
    {
      id: DEFAULTS.compile,
      category: ["OneDiff", "New nodes", "Compile"],
      name: "Who waits for compilation in new nodes",
      type: "combo",
      options: ["auto", "background", "wait"],
      defaultValue: "auto",
    },
    {
      id: "OneDiff.CacheFolder",
      category: ["OneDiff", "Graphs on disk", "Folder"],
      name: "Folder for compiled graphs (after a restart of ComfyUI)",
      tooltip: "Empty: the default folder. The environment variable ONEDIFF_CACHE_DIR takes precedence.",
      type: "text",
      defaultValue: "",
    },
    {
      id: "OneDiff.CacheLimitMB",
      category: ["OneDiff", "Graphs on disk", "Limit"],
      name: "Disk space for compiled graphs, in MB (after a restart of ComfyUI)",
      tooltip: "0: 20 GB. The environment variable ONEDIFF_CACHE_LIMIT_MB takes precedence.",
      type: "number",
      attrs: { min: 0, step: 1000 },
      defaultValue: 0,
    },
  ],

  async setup() {
    // The editor leaves nodes out that it does not know, where a file has the form of the API: no question is asked,
    // and their wires are gone. No hook of its own comes before that.
    const replacements = await answerOf("/node_replacements");
    const open = app.loadApiJson.bind(app);
    app.loadApiJson = (/** @type {any} */ workflow, /** @type {any[]} */ ...others) =>
      open(withoutOldNodes(workflow, replacements, isKnown), ...others);

    const style = document.createElement("style");
    style.textContent = STYLE;
    document.head.append(style);

    api.addEventListener("onediff.status", (/** @type {CustomEvent} */ event) => {
      show({ app, api, language }, event.detail);
      if (event.detail.progress?.phase === "background") followBackground();
    });
    for (const over of ["execution_success", "execution_error", "execution_interrupted"])
      api.addEventListener(over, () => {
        runEnded();
        app.canvas.setDirty(true, true);
        void refreshPanel();
      });
    setInterval(() => underWay() && app.canvas.setDirty(true, false), TICK_MS);

    app.extensionManager.registerSidebarTab({
      id: "onediff",
      icon: "pi pi-bolt",
      title: "OneDiff",
      tooltip: text(language(), "tooltip"),
      type: "custom",
      render: (/** @type {HTMLElement} */ container) => {
        refreshPanel = panel(container, api, language, say);
      },
    });
  },

  /** @param {any} nodeType @param {any} nodeData */
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith(OURS)) return;
    const before = nodeType.prototype.onDrawForeground;
    nodeType.prototype.onDrawForeground = function (/** @type {CanvasRenderingContext2D} */ context, ...others) {
      const result = before?.call(this, context, ...others);
      drawBar(this, context, language());
      return result;
    };
  },

  /** @param {any} node one that was just made; of a workflow that is opened, its own values follow */
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith(OURS)) return;
    keepProperSize(node);
    for (const [name, id] of Object.entries(DEFAULTS)) {
      const widget = node.widgets?.find((/** @type {any} */ one) => one.name === name);
      if (widget) widget.value = setting(id) ?? widget.value;
    }
  },
});
