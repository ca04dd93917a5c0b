// The conversation: a tree of turns of which one path is shown. An edited, repeated or branched turn is a sibling.

const ROOT = 0; // the parent of first turns

export class Tree {
  constructor(saved) {
    Object.assign(this, { nodes: {}, picked: {}, lastId: ROOT }, saved);
  }

  // A new turn below `parent`, which becomes the shown one unless `isPicked` is false.
  add(parent, fields, isPicked = true) {
    const node = { id: ++this.lastId, parent: parent?.id ?? ROOT, version: 0, ...fields };
    this.nodes[node.id] = node;
    if (isPicked || !this.picked[node.parent]) this.pick(node);
    return node;
  }

  // Shows a turn, and below it what was shown there last.
  pick(node) {
    for (let at = node; at; at = this.nodes[at.parent]) this.picked[at.parent] = at.id;
  }

  parentOf(node) {
    return this.nodes[node.parent] ?? null;
  }

  childrenOf(node) {
    const id = node?.id ?? ROOT;
    return Object.values(this.nodes).filter(({ parent }) => parent === id);
  }

  siblingsOf(node) {
    return Object.values(this.nodes).filter(({ parent }) => parent === node.parent);
  }

  // The shown turns, first to last.
  path() {
    const path = [];
    for (let at = this.nodes[this.picked[ROOT]]; at; at = this.nodes[this.picked[at.id]]) path.push(at);
    return path;
  }

  // The turns from the first to `node`.
  pathTo(node) {
    const path = [];
    for (let at = node; at; at = this.nodes[at.parent]) path.unshift(at);
    return path;
  }

  get hasBranches() {
    return new Set(Object.values(this.nodes).map(({ parent }) => parent)).size < Object.keys(this.nodes).length;
  }

  // Without what only a running page needs: waterfalls, and the state of a stream.
  toJSON() {
    const nodes = {};
    for (const [id, { explained, isUnfolded, isRunning, progress, ...kept }] of Object.entries(this.nodes))
      nodes[id] = isRunning ? { ...kept, end: { kind: "reload" } } : kept;
    return { nodes, picked: this.picked, lastId: this.lastId };
  }
}

// Marks a turn as changed, so that it is drawn again.
export const touch = (node) => {
  node.version += 1;
};
