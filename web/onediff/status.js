// @ts-check
/** What a node shows: a bar while it compiles, its status in whole words, all of it at a click. */

import { size, text } from "./texts.js";

/**
 * @typedef {{phase: import("./texts.js").Key, seconds: number | null, expected: number | null}} Progress
 * @typedef {{node: string, text: string, progress: Progress | null}} Status
 * @typedef {{app: any, api: any, language: () => string}} Editor ComfyUI's app and api; the api knows the server's path
 */

const WIDGET = "$$node-text-preview"; // in which the editor shows what send_progress_text says
const BAR = { height: 18, gap: 6, radius: 4 };
const HIGHEST = 200; // of the widget, in the editor's pixels; beyond it the editor scrolls

/** @type {Map<string, Progress & {at: number}>} */
const working = new Map();

/**
 * Note what a node says, and see to it that it can be read.
 * @param {Editor} editor
 * @param {Status} status
 */
export function show(editor, status) {
  const app = editor.app;
  if (status.progress) working.set(status.node, { ...status.progress, at: performance.now() });
  else working.delete(status.node);
  app.canvas?.setDirty(true, true);
  const node = nodeOf(app, status.node);
  if (node) requestAnimationFrame(() => setTimeout(() => fit(editor, node, status.text), 60));
}

/** Forget what was under way in a run that is over; a background compilation goes on. */
export function runEnded() {
  for (const [node, progress] of working) if (progress.phase !== "background") working.delete(node);
}

/** Forget background compilations: they are done. */
export function backgroundEnded() {
  for (const [node, progress] of working) if (progress.phase === "background") working.delete(node);
}

/** @returns {boolean} whether a bar is to be drawn anew as time goes by */
export function underWay() {
  return working.size > 0;
}

/**
 * Return what the bar of a node says, and how full it is, or null if it has none.
 * @param {string} id
 * @param {string} language
 * @returns {{label: string, share: number | null} | null}
 */
export function barOf(id, language) {
  const progress = working.get(id);
  if (!progress) return null;
  const phase = text(language, progress.phase);
  if (progress.seconds === null) return { label: phase, share: null };
  const seconds = Math.round(progress.seconds + (performance.now() - progress.at) / 1000);
  if (progress.expected === null || seconds > progress.expected)
    return { label: `${phase} · ${text(language, "soFar", { seconds })}`, share: null };
  const expected = Math.round(progress.expected);
  return {
    label: `${phase} · ${text(language, "soFarOf", { seconds, expected })}`,
    share: seconds / Math.max(1, progress.expected),
  };
}

/**
 * Draw the bar below a node.
 * @param {any} node
 * @param {CanvasRenderingContext2D} context
 * @param {string} language
 */
export function drawBar(node, context, language) {
  const bar = node.flags?.collapsed ? null : barOf(String(node.id), language);
  if (!bar) return;
  const [width, bottom] = [node.size[0], node.size[1] + BAR.gap];
  context.save();
  context.fillStyle = "#1b1f24";
  rounded(context, 0, bottom, width, BAR.height);
  context.fillStyle = "#4e7a35";
  if (bar.share !== null) rounded(context, 0, bottom, width * Math.min(1, bar.share), BAR.height);
  else {
    // Nobody knows for how long: a piece that goes to and fro.
    const place = Math.abs(((performance.now() / 1500) % 2) - 1);
    rounded(context, place * width * 0.75, bottom, width * 0.25, BAR.height);
  }
  context.fillStyle = "#ffffff";
  context.font = "12px sans-serif";
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(bar.label, 8, bottom + BAR.height / 2 + 1, width - 16);
  context.restore();
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} w @param {number} h */
function rounded(context, x, y, w, h) {
  context.beginPath();
  context.roundRect(x, y, w, h, BAR.radius);
  context.fill();
}

/** @param {any} app @param {string} id @returns {any} the node on the canvas, also of a subgraph's id */
function nodeOf(app, id) {
  const graph = app.canvas?.graph ?? app.graph;
  return graph?.getNodeById?.(Number(id.split(":").pop())) ?? null;
}

/**
 * Break a status between words, give it the height that it needs, and open all of it at a click.
 * @param {Editor} editor @param {any} node @param {string} said
 */
function fit(editor, node, said) {
  const element = elementOf(said);
  const widget = node.widgets?.find((/** @type {any} */ one) => one.name === WIDGET);
  if (!element || !widget) return;
  element.dataset.onediff = "status";
  element.title = text(editor.language(), "open");
  element.onclick = () => openWhole(editor, said, node);
  const inner = /** @type {HTMLElement | null} */ (element.querySelector(".break-all"));
  const wanted = Math.min(HIGHEST, (inner?.scrollHeight ?? 20) + 24);
  widget.options.getMinHeight = () => wanted;
  const least = node.computeSize();
  if (node.size[1] < least[1]) node.setSize([node.size[0], least[1]]);
  editor.app.canvas.setDirty(true, true);
}

/** @param {string} said @returns {HTMLElement | null} what the editor shows it in */
function elementOf(said) {
  const bare = (/** @type {string} */ one) => one.replace(/\s+/g, "");
  const wanted = bare(said);
  const all = /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".dom-widget"));
  return [...all].find((one) => bare(one.textContent ?? "") === wanted) ?? null;
}

/**
 * Show a status in whole, to be read and copied.
 * @param {Editor} editor @param {string} said @param {any} node
 */
function openWhole(editor, said, node) {
  const language = editor.language();
  const dialog = document.createElement("dialog");
  dialog.className = "onediff-dialog";
  const title = document.createElement("h3");
  title.textContent = node.title;
  const whole = document.createElement("pre");
  whole.textContent = said;
  const copy = document.createElement("button");
  copy.textContent = text(language, "copy");
  copy.onclick = async () => {
    const copied = await copyText(await diagnosis(editor.api, said, node));
    copy.textContent = text(language, copied ? "copied" : "notCopied");
  };
  const close = document.createElement("button");
  close.textContent = text(language, "close");
  close.onclick = () => dialog.close();
  dialog.onclose = () => dialog.remove();
  dialog.append(title, whole, copy, close);
  document.body.append(dialog);
  dialog.showModal();
}

/**
 * Return what somebody who is asked for help wants to know: the text, versions, counters.
 * @param {any} api ComfyUI's
 * @param {string} said @param {any} node
 * @returns {Promise<string>}
 */
export async function diagnosis(api, said, node) {
  const lines = [`${node.type}: ${said}`];
  try {
    const [stats, report] = await Promise.all(
      ["/system_stats", "/onediff/report"].map(async (path) => (await api.fetchApi(path)).json()),
    );
    const { comfyui_version: host, python_version: python, pytorch_version: torch, os } = stats.system;
    lines.push(`ComfyUI ${host}, torch ${torch}, Python ${python}, ${os}`);
    for (const device of stats.devices) lines.push(`${device.name}, ${size(device.vram_total)}`);
    const { graphs: _graphs, objects: _objects, fallbacks, ...counted } = report;
    lines.push(JSON.stringify(counted));
    for (const [reason, count] of Object.entries(fallbacks ?? {})) lines.push(`${count} eager: ${reason}`);
  } catch (error) {
    lines.push(String(error));
  }
  return lines.join("\n");
}

/** @param {string} content @returns {Promise<boolean>} whether it is in the clipboard now */
async function copyText(content) {
  try {
    await navigator.clipboard.writeText(content);
    return true;
  } catch {
    const area = document.createElement("textarea"); // the way of pages that are not https
    area.value = content;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}
