// @ts-check
/** Workflows of the earlier OneDiff in the form of the API: our nodes in place of its, as the server would put them. */

/**
 * @typedef {{class_type: string, inputs: Record<string, any>, _meta?: {title?: string}}} ApiNode
 * @typedef {{new_id: string, old_id?: string, set_value?: any}} Input
 * @typedef {{new_node_id: string, input_mapping: Input[] | null}} Replacement
 */

const OURS = "OneDiff";

/**
 * Return a workflow with the old nodes that we know replaced, and everything else as it is. Outputs keep their numbers.
 * @param {Record<string, ApiNode>} workflow
 * @param {Record<string, Replacement[]>} replacements by the type of the old node, as the server tells them
 * @param {(type: string) => boolean} isKnown whether the editor has nodes of a type: those stay
 * @returns {Record<string, ApiNode>}
 */
export function withoutOldNodes(workflow, replacements, isKnown) {
  const replaced = Object.entries(workflow).map(([id, node]) => {
    const found = isKnown(node.class_type) ? undefined : replacements[node.class_type]?.[0];
    return [id, found?.new_node_id.startsWith(OURS) ? inPlaceOf(node, found) : node];
  });
  return Object.fromEntries(replaced);
}

/** @param {ApiNode} node @param {Replacement} replacement @returns {ApiNode} */
function inPlaceOf(node, { new_node_id, input_mapping }) {
  /** @type {Record<string, any>} */
  const inputs = {};
  for (const { new_id, old_id, set_value } of input_mapping ?? []) {
    if (old_id === undefined || old_id === null) inputs[new_id] = set_value;
    else if (old_id in node.inputs) inputs[new_id] = node.inputs[old_id];
  }
  return { class_type: new_node_id, inputs };
}
