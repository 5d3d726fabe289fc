// node consumer.mjs BROKER TOPIC MODEL: prints each update, and a prediction for each row (JSON) of standard input.

import { randomUUID } from "node:crypto";
import { createInterface } from "node:readline";
import { linearModel } from "./linear-model.mjs";
import { follow } from "./model-updates.mjs";

const [broker, topic, model] = process.argv.slice(2);
const MARK = randomUUID();
let current = null;

const consumer = await follow({
  brokers: [broker],
  topic,
  model,
  onUpdate: ({ generation, version, document }) => {
    const predict = linearModel(document.parameters);
    current = { generation, version, positive: predict.positive, predict };
    console.log(JSON.stringify({ generation, version, metrics: document.metrics }));
  },
});

// JSON.parse would round whole numbers above 2**53, which may be ids: they become BigInts.
function parsed(line) {
  JSON.parse(line); // Throws for what is no JSON.
  const marked = line.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, (token) =>
    /^-?\d{16,}$/.test(token) ? JSON.stringify(MARK + token) : token,
  );
  const isMarked = (value) => typeof value === "string" && value.startsWith(MARK);
  return JSON.parse(marked, (_, value) => (isMarked(value) ? BigInt(value.slice(MARK.length)) : value));
}

// A wrong row gets an error, and the next row a prediction.
function answer(line) {
  if (!current) return { error: "no model yet" };
  const { predict, ...named } = current; // An answer is of one version.
  try {
    return { ...named, prediction: predict(parsed(line)) };
  } catch (error) {
    return { ...named, error: error.message };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(answer(line)));
}
await consumer.disconnect();
