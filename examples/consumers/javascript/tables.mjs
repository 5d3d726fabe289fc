// Adds up the tables of a published model, as docs/model-updates.md describes them.

const HUGE = 1e100; // Larger numbers count as missing.
const OF_COLUMN = 61;
const OF_PAIR = 256;
const coarse = (fine) => (fine + 3) >> 2;

// Returns a function from the values of a row by field to a list with the scores of each member.
// A value is a number, a truth value, a text or null; `fields` and `texts` are those of the linear member.
export function tables(shapes, fields, texts, placeOf) {
  const columns = shapes.fields.map((field, column) => binsOf(shapes, column, field, fields, texts, placeOf));
  const members = shapes.members.map((member) => scoresOf(member, columns.length));
  return (values) => {
    const bins = columns.map((column) => column(values));
    return members.map((scores) => scores(bins));
  };
}

// Returns the function from values to the fine bin of a column, and the distance of its number from the center.
function binsOf(shapes, column, field, fields, texts, placeOf) {
  const of = (name) => shapes[name][column];
  const [kind, edges, period, center, limit] = ["kinds", "edges", "period", "center", "limit"].map(of);
  if (kind === "category") {
    const rows = shapes.categories.filter(([where]) => where === column);
    const bins = new Map(rows.map(([, place, fine]) => [place, fine]));
    return (values) => {
      const text = texts.has(field) ? values.get(field) : null;
      const fine = typeof text === "string" ? (bins.get(placeOf(field, text)) ?? shapes.other[column]) : 0;
      return { fine, distance: 0 };
    };
  }
  if (!["number", "period"].includes(kind)) {
    throw new Error(`a column of the kind ${kind}, which only a newer consumer knows`);
  }
  return (values) => {
    const given = fields.has(field) ? values.get(field) : null;
    const isThere = (typeof given === "number" || typeof given === "boolean") && Math.abs(given) <= HUGE;
    if (!isThere) return { fine: 0, distance: 0 };
    const value = period > 0 ? Number(given) - period * Math.floor(Number(given) / period) : Number(given);
    return { fine: 1 + countBelow(edges, value), distance: Math.min(Math.max(value - center, -limit), limit) };
  };
}

// Returns how many of the edges, which are in ascending order, are below the value.
function countBelow(edges, value) {
  let [low, high] = [0, edges.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (edges[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function scoresOf({ tables, slopes, intercept, pairs, tree_columns, tree_bins }, columns) {
  const atPairs = columns * OF_COLUMN;
  const atTrees = atPairs + pairs.length * OF_PAIR;
  const bitsOf = (bins, names, at) => names.reduce((cell, column, bit) => 2 * cell + (bins[column].fine > at[bit]), 0);
  function* cells(bins) {
    for (let column = 0; column < columns; column++) yield column * OF_COLUMN + bins[column].fine;
    for (const [index, [first, second]] of pairs.entries()) {
      yield atPairs + index * OF_PAIR + 16 * coarse(bins[first].fine) + coarse(bins[second].fine);
    }
    for (const [index, names] of tree_columns.entries()) {
      yield atTrees + index * 2 ** names.length + bitsOf(bins, names, tree_bins[index]);
    }
  }
  return (bins) => {
    const sums = intercept.map(() => 0);
    for (const cell of cells(bins)) tables[cell].forEach((number, score) => (sums[score] += number));
    bins.forEach(({ distance }, column) => slopes[column].forEach((slope, score) => (sums[score] += distance * slope)));
    return sums.map((sum, score) => sum + intercept[score]);
  };
}
