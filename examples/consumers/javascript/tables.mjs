// Adds up the tables of a published model, as docs/model-updates.md describes them.

const OF_COLUMN = 61;
const OF_PAIR = 256;
const coarse = (fine) => (fine + 3) >> 2;

// Returns a function from a row to a list with the scores of each member. A row is here the numbers, distances from
// the centers, and positions in the linear model's places of its texts: {numbers: Map, distances: [], places: []}.
export function tables({ fields, kinds, edges, categories, members }) {
  const unknown = kinds.find((kind) => !["number", "category"].includes(kind));
  if (unknown) throw new Error(`a column of the kind ${unknown}, which only a newer consumer knows`);
  const sums = members.map((member) => scoresOf(member, fields.length));
  return ({ numbers, distances, places }) => {
    const fine = fields.map((field, column) => {
      const isThere = kinds[column] === "number" && numbers.has(field);
      return isThere ? 1 + countBelow(edges[column], numbers.get(field)) : 0;
    });
    for (const place of places.sort((a, b) => a - b)) {
      const cell = categories[place];
      if (cell > 0) fine[Math.floor(cell / OF_COLUMN)] = cell % OF_COLUMN;
    }
    return sums.map((scores) => scores(fine, distances));
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
  const bitsOf = (fine, names, at) => names.reduce((cell, column, bit) => 2 * cell + (fine[column] > at[bit]), 0);
  function* cells(fine) {
    for (let column = 0; column < columns; column++) yield column * OF_COLUMN + fine[column];
    for (const [index, [first, second]] of pairs.entries()) {
      yield atPairs + index * OF_PAIR + 16 * coarse(fine[first]) + coarse(fine[second]);
    }
    for (const [index, names] of tree_columns.entries()) {
      yield atTrees + index * 2 ** names.length + bitsOf(fine, names, tree_bins[index]);
    }
  }
  return (fine, distances) => {
    const sums = intercept.map(() => 0);
    for (const cell of cells(fine)) tables[cell].forEach((number, score) => (sums[score] += number));
    distances.forEach((distance, field) => slopes[field].forEach((slope, score) => (sums[score] += distance * slope)));
    return sums.map((sum, score) => sum + intercept[score]);
  };
}
