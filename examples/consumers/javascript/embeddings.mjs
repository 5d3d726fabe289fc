// Computes the scores of the embeddings of a published model, as docs/model-updates.md describes it.

const HASH_BITS = 52n;
const DEVIATIONS = 10; // The limit of a numeric column is so many deviations.
const KINDS = ["fm", "deepfm", "wide and deep"];

// Returns a function from a row to the scores of each expert: one, or one for each class. A row is here its features, [field, hash] with the name of
// the field, or null for a missing value, and the distances of the linear model's fields from their centers.
export function embeddings({ kind, text_fields, keys, admitted, early, scale, scores = 1, experts }, limit) {
  if (!KINDS.includes(kind)) throw new Error(`embeddings of the kind ${kind}, which only a newer consumer knows`);
  const [positions, rows] = [keys, admitted].map(
    (each) => new Map(each.map((key, position) => [BigInt(key), position])), // Keys have 62 bits.
  );
  const numberOf = new Map([[null, 0], ...text_fields.map((name, index) => [name, index + 1])]);

  function keyOf(field, hash) {
    return (BigInt(field) << HASH_BITS) | BigInt.asUintN(Number(HASH_BITS), hash);
  }

  return (features, distances) => {
    const known = features
      .map(([name, hash]) => [numberOf.get(name), hash])
      .filter(([field]) => field !== undefined)
      .map(([field, hash]) => [field, keyOf(field, hash)])
      .map(([field, key]) => [field, positions.get(key), rows.get(key), early[positions.get(key)]]);
    const deviations = distances.map((distance, index) => (limit[index] > 0 ? (DEVIATIONS * distance) / limit[index] : 0));
    const sums = experts.map((head, place) => head.intercept + scale * sumOf(head, place, scores, known, deviations));
    return sums.flatMap((_, place) => (place % scores ? [] : [sums.slice(place, place + scores)]));
  };
}

function sumOf(head, place, scores, features, deviations) {
  const { weights, vectors, commons, early_steps, numbers, products, layers } = head;
  // The mean of the weights and vectors of each field's features; 0 without a feature.
  const fields = commons.map((common) => [0, ...common].map(() => 0));
  const counts = commons.map(() => 0);
  // A feature without a vector has the common one, and a step for each 4 bits of what it has learned.
  const [first, shift] = [(place % scores) * commons[0].length, 4 * Math.floor(place / scores)];
  const early = (field, bytes) =>
    commons[field].map((value, at) => value + early_steps[(bytes[first + at] >> shift) & 15]);
  for (const [field, position, row, bytes] of features) {
    const vector = vectors[row] ?? (bytes ? early(field, bytes) : commons[field]);
    add(fields[field], [weights[position] ?? 0, ...vector], 1);
    counts[field] += 1;
  }
  const means = fields.map((sums, field) => sums.map((sum) => sum / Math.max(counts[field], 1)));
  const terms = [...means, ...numbers.map((each, index) => each.map((value) => value * deviations[index]))];
  const total = fields[0].map(() => 0);
  terms.forEach((term) => add(total, term, 1));
  let sum = total[0];
  if (products) sum += 0.5 * (squares(total) - terms.reduce((before, term) => before + squares(term), 0));
  if (layers.length) sum += throughLayers(layers, [...means.flatMap(([, ...vector]) => vector), ...deviations]);
  return sum;
}

function add(sums, values, factor) {
  values.forEach((value, index) => (sums[index] += factor * value));
}

// The squares of a vector, without its weight.
function squares([, ...vector]) {
  return vector.reduce((sum, value) => sum + value * value, 0);
}

function throughLayers(layers, inputs) {
  let values = inputs;
  for (const [index, { weights, bias }] of layers.entries()) {
    const sums = [...bias];
    values.forEach((value, input) => add(sums, weights[input], value));
    values = index < layers.length - 1 ? sums.map((sum) => Math.max(sum, 0)) : sums;
  }
  return values[0];
}
