// Predicts with the parameters of a published linear model, or of one with tables or embeddings, with the same numbers
// as LinearPredictor in Python.

import { embeddings } from "./embeddings.mjs";
import { preparation } from "./fields.mjs";
import { tables } from "./tables.mjs";

const TEXT_FOLLOWS = 0xff;
const IS_MISSING = 0xfe;
const HUGE = 1e100; // Larger numbers count as missing.
const SCORE_MAX = 30;

const sigmoid = (score) => (score >= 0 ? 1 / (1 + Math.exp(-score)) : Math.exp(score) / (1 + Math.exp(score)));
const clip = (value, low, high) => Math.min(Math.max(value, low), high);
const LINKS = { identity: (score) => score, logit: sigmoid, log: (score) => Math.exp(Math.min(score, 700)) };

// Returns a function from a row to its prediction: a number, or for classes an object of label and probability.
// If the number is the probability of one of two labels, this label is its property `positive`.
export function linearModel(parameters) {
  if (Array.isArray(parameters)) return plainModel({ weights: parameters });
  // Of crosses, of sparse rows, and of clusters, which have weights, too.
  const beyond = ["crosses", "width", "centroids"].find((name) => name in parameters);
  if (beyond) throw new Error(`a model with ${beyond}, which only the predictor in Python has`);
  return "center" in parameters ? standardizedModel(parameters) : plainModel(parameters);
}

// A whole number of any size as a number.
const rounded = (value) => (typeof value === "bigint" ? Number(value) : value);

// A row is a list of numbers.
function plainModel({ weights, intercept = 0, link = "identity", mean, deviation }) {
  const scaled = (value, column) =>
    deviation ? (deviation[column] > 0 ? (value - mean[column]) / deviation[column] : 0) : value;
  return (given) => {
    const row = Array.isArray(given) ? given.map(rounded) : given;
    const fits = Array.isArray(row) && row.length === weights.length && row.every((value) => typeof value === "number");
    if (!fits) throw new Error(`expected a row of ${weights.length} numbers`);
    return LINKS[link](row.reduce((sum, value, column) => sum + weights[column] * scaled(value, column), intercept));
  };
}

// A row is an object of numbers and texts by field. Throws for a row that does not fit the model.
function standardizedModel({ weights, intercept, center, limit, fields, places, text_fields, bits, link, ...model }) {
  const prepared = preparation({ ...model, text_fields });
  const scores = (column) => [].concat(weights[column]); // One weight, or one for each class.
  const columns = new Map(fields.map((name, column) => [name, column]));
  const hashed = new Map(places.map((place, index) => [place, fields.length + index]));
  const texts = new Set(text_fields);
  const vectors = new Set(fields.filter((name) => name.endsWith("]")).map((name) => name.slice(0, name.lastIndexOf("["))));
  const isKnown = (name) => columns.has(name) || texts.has(name) || vectors.has(name);

  // A list of numbers is a field for each of them; of a list of texts, each different text counts once.
  function* fieldsOf(row) {
    for (const [name, value] of prepared(row)) {
      if (!Array.isArray(value)) yield [name, value];
      else if (value.every((each) => typeof each === "string")) yield* [...new Set(value)].map((text) => [name, text]);
      else if (vectors.has(name)) yield* value.map((number, place) => [`${name}[${place}]`, number]);
      else if (isKnown(name)) throw new Error(`expected a number, a text or null in the field ${name}`);
    }
  }

  function featuresOf(name, given, seen) {
    const value = rounded(given);
    const isNumber = typeof value === "number" || typeof value === "boolean";
    if (value === null || value === undefined || (isNumber && !(Math.abs(value) <= HUGE))) {
      return hashedFeature(name, IS_MISSING, "", seen);
    }
    if (typeof value === "string") {
      if (columns.has(name) && !texts.has(name)) throw new Error(`expected a number in the field ${name}, given a text`);
      return texts.has(name) ? hashedFeature(name, TEXT_FOLLOWS, value, seen) : null;
    }
    if (!isNumber && isKnown(name)) throw new Error(`expected a number, a text or null in the field ${name}`);
    const column = columns.get(name);
    if (column === undefined && texts.has(name)) throw new Error(`expected a text in the field ${name}, given a number`);
    return column === undefined ? null : [column, clip(Number(value) - center[column], -limit[column], limit[column])];
  }

  function hashedFeature(name, separator, text, seen) {
    const hash = hashOf(name, separator, text);
    seen.features.push([separator === IS_MISSING ? null : name, hash]);
    const column = hashed.get(Number(BigInt.asUintN(bits, hash))); // The place: the low bits.
    return column === undefined ? null : [column, Math.min(1, limit[column])];
  }

  const scoresOfTables = model.shapes ? tables(model.shapes) : () => [];
  const mixture = model.shapes?.mixture ?? [1];
  const scoresOfEmbeddings = model.embeddings && embeddings(model.embeddings, limit);

  function linked(sums) {
    if (link === "clipped") return [clip(sums[0], model.lowest, model.highest)];
    if (link === "log") return [clip(Math.exp(Math.min(sums[0], 700)), model.lowest, model.highest)];
    if (link === "logit") return [sigmoid(clip(sums[0], -SCORE_MAX, SCORE_MAX))];
    return softmax(sums);
  }

  const predict = (row) => {
    if (row === null || typeof row !== "object" || Array.isArray(row)) throw new Error("expected a row of named fields");
    const sums = [].concat(intercept);
    const seen = { numbers: new Map(), distances: fields.map(() => 0), places: [], features: [] };
    for (const [name, value] of fieldsOf(row)) {
      const feature = featuresOf(name, value, seen);
      if (!feature) continue;
      const [column, distance] = feature;
      scores(column).forEach((weight, score) => (sums[score] += weight * distance));
      if (column >= fields.length) seen.places.push(column - fields.length);
      else {
        seen.numbers.set(name, Number(rounded(value)));
        seen.distances[column] = distance;
      }
    }
    const mixed = sums.map(() => 0);
    [sums, ...scoresOfTables(seen)].map(linked).forEach((predicted, member) => {
      predicted.forEach((number, score) => (mixed[score] += mixture[member] * number));
    });
    if (scoresOfEmbeddings) {
      const { experts, scores: count = 1 } = model.embeddings;
      const shares = experts.filter((_, place) => place % count === 0).map(({ share }) => share);
      const rest = 1 - shares.reduce((sum, share) => sum + share, 0);
      mixed.forEach((number, score) => (mixed[score] = rest * number));
      scoresOfEmbeddings(seen.features, seen.distances).forEach((own, expert) => {
        linked(own).forEach((number, score) => (mixed[score] += shares[expert] * number));
      });
    }
    if (link !== "softmax") return mixed[0];
    return Object.fromEntries(mixed.map((value, score) => [model.classes[score] ?? "(other)", value]));
  };
  if (link === "logit" && model.classes) predict.positive = model.classes[1];
  return predict;
}

// A last probability without a label is that of a class that has not come yet.
function softmax(sums) {
  const raised = sums.map((sum) => Math.exp(sum - Math.max(...sums)));
  const total = raised.reduce((sum, value) => sum + value, 0);
  return raised.map((value) => value / total);
}

// 64 bits of FNV-1a, mixed.
function hashOf(name, separator, text) {
  let hash = 0xcbf29ce484222325n;
  for (const byte of [...Buffer.from(name), separator, ...Buffer.from(text)]) {
    hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  }
  hash = BigInt.asUintN(64, (hash ^ (hash >> 33n)) * 0xff51afd7ed558ccdn);
  return hash ^ (hash >> 33n);
}
