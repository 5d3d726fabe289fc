// node consumer.mjs BROKER TOPIC MODEL: prints each update, and a prediction for each row (JSON) of standard input.

import { createInterface } from "node:readline";
import { linearModel } from "./linear-model.mjs";
import { follow } from "./model-updates.mjs";

const [broker, topic, model] = process.argv.slice(2);
let current = null;

const consumer = await follow({
  brokers: [broker],
  topic,
  model,
  onUpdate: ({ generation, version, document }) => {
    current = { generation, version, predict: linearModel(document.parameters) };
    console.log(JSON.stringify({ generation, version, metrics: document.metrics }));
  },
});

for await (const line of createInterface({ input: process.stdin })) {
  const { generation, version, predict } = current ?? {};
  console.log(JSON.stringify(predict ? { generation, version, prediction: predict(JSON.parse(line)) } : { error: "no model yet" }));
}
await consumer.disconnect();
