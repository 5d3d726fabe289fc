// Applies the operations of a change to the parameters of the update before it; these stay as they are.
// The format is described in docs/model-updates.md.

export function applied(parameters, changes) {
  return changes.reduce((before, change) => changed(before, change.path, change), parameters);
}

function changed(value, [name, ...rest], change) {
  if (name === undefined) return result(value, change);
  if (name === "state" && change.path.length === 1) return value; // It is for trainings only.
  const copy = Array.isArray(value) ? [...value] : { ...value };
  copy[name] = changed(copy[name], rest, change);
  return copy;
}

function result(old, { value, names, removed = [], inserted = [], rows, values, ...others }) {
  if (value !== undefined) return value;
  if (names !== undefined) return Object.fromEntries(names.map((name) => [name, old[name]]));
  if (rows === undefined) throw new Error(`expected an operation of format 4, given one of ${Object.keys(others)}`);
  const leaves = new Set(removed);
  const comes = new Set(inserted);
  const kept = old.filter((_, row) => !leaves.has(row)).values();
  const length = old.length - removed.length + inserted.length;
  const array = Array.from({ length }, (_, row) => (comes.has(row) ? null : kept.next().value));
  rows.forEach((row, index) => (array[row] = values[index]));
  return array;
}
