// node consumer.mjs BROKER TOPIC MODEL: prints each update, and a prediction for each row (JSON) of standard input.

import { createInterface } from "node:readline";
import { linearModel } from "./linear-model.mjs";
import { follow } from "./model-updates.mjs";
import { parsed } from "./numbers.mjs";

const [broker, topic, model] = process.argv.slice(2);
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
