// @ts-check
/** What the extension says, in the person's language. */

/** @typedef {keyof typeof ENGLISH} Key */

export const ENGLISH = {
  capturing: "Reading the model",
  compiling: "Compiling",
  loading: "Loading the compiled graph",
  waiting: "Waiting for another compilation",
  background: "Compiling in the background",
  soFar: "{seconds} s",
  soFarOf: "{seconds} s of about {expected} s",
  done: "Compiled in the background. Images are faster from now on.",
  open: "Click for the full text",
  copy: "Copy for a bug report",
  copied: "Copied",
  notCopied: "The browser does not allow copying; select the text instead.",
  close: "Close",
  tooltip: "OneDiff: compiled graphs",
  refresh: "Refresh",
  freeMemory: "Free memory",
  clear: "Remove all",
  clearSure: "Remove all compiled graphs from disk? Those you use again will be recompiled.",
  remove: "Remove",
  removed: "Removed: {count}",
  freed: "Freed: {bytes}",
  failed: "ComfyUI did not answer: {reason}",
  none: "No compiled graphs yet. Put OneDiff Optimize after a loader and make an image.",
  saved: "{seconds} s saved so far",
  notSaved: "No time savings measured yet",
  disk: "{used} of {limit} on disk",
  memory: "{used} of {limit} in memory",
  lastUsed: "last used {when}",
  calls: "{count} calls",
  savedBy: "{seconds} s saved",
  inMemory: "{bytes} in memory",
  compiledIn: "compiled in {seconds} s",
  eager: "Ran without acceleration",
  times: "{count} × {reason}",
  nothingEager: "Nothing ran without acceleration.",
};

/** @type {Record<Key, string>} */
export const CHINESE = {
  capturing: "正在读取模型",
  compiling: "编译中",
  loading: "正在加载编译图",
  waiting: "正在等待另一项编译",
  background: "后台编译中",
  soFar: "{seconds} 秒",
  soFarOf: "{seconds} 秒，预计约 {expected} 秒",
  done: "后台编译完成。从现在起图像生成更快。",
  open: "点击查看全文",
  copy: "复制，用于报告问题",
  copied: "已复制",
  notCopied: "浏览器不允许复制；请选中文字。",
  close: "关闭",
  tooltip: "OneDiff：编译图",
  refresh: "刷新",
  freeMemory: "释放内存",
  clear: "全部删除",
  clearSure: "从磁盘删除所有编译图？需要时会重新编译。",
  remove: "删除",
  removed: "已删除：{count}",
  freed: "已释放：{bytes}",
  failed: "ComfyUI 没有响应：{reason}",
  none: "还没有编译图。在加载器之后放一个“OneDiff 优化”，然后生成一张图像。",
  saved: "目前已节省 {seconds} 秒",
  notSaved: "尚无已知的节省时间",
  disk: "磁盘 {used} / {limit}",
  memory: "内存 {used} / {limit}",
  lastUsed: "上次使用 {when}",
  calls: "{count} 次调用",
  savedBy: "节省 {seconds} 秒",
  inMemory: "内存中 {bytes}",
  compiledIn: "编译用时 {seconds} 秒",
  eager: "未加速的调用",
  times: "{count} × {reason}",
  nothingEager: "没有未加速的调用。",
};

/**
 * Return a text in a language, with its values put in.
 * @param {string} language as ComfyUI's setting has it: "en", "zh", "zh-TW", …
 * @param {Key} key
 * @param {Record<string, string | number>} [values]
 * @returns {string}
 */
export function text(language, key, values = {}) {
  const template = (language.startsWith("zh") ? CHINESE : ENGLISH)[key];
  return template.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

/**
 * Return a number of bytes for people.
 * @param {number} bytes
 * @returns {string}
 */
export function size(bytes) {
  if (bytes < 1 << 20) return `${Math.ceil(bytes / 1024)} KB`;
  return bytes < 1 << 30 ? `${(bytes / (1 << 20)).toFixed(0)} MB` : `${(bytes / (1 << 30)).toFixed(1)} GB`;
}
