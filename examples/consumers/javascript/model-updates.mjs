// Follows the updates of one model in a Kafka topic: joins chunks, skips what is not newer, decodes parameters.
// The format is described in docs/model-updates.md.

import { createHash, randomUUID } from "node:crypto";
import { Kafka, logLevel } from "kafkajs";
import { applied } from "./changes.mjs";
import { parsed } from "./numbers.mjs";

// Without the header it is the first; the second is of models with tables, the third of those with embeddings, the
// fourth of changes.
const FORMATS = ["1", "2", "3", "4"];

// Calls onUpdate with each update that is newer than those before: {generation, version, createdAt, document}.
export async function follow({ brokers, topic, model, onUpdate, onError = console.error }) {
  const kafka = new Kafka({ brokers, logLevel: logLevel.NOTHING });
  // A group of its own reads all partitions, and commits nothing. Records of aborted transactions are left out.
  const consumer = kafka.consumer({ groupId: `model-consumer-${randomUUID()}`, readUncommitted: false });
  const updates = new UpdateReader(model);
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  await consumer.run({
    autoCommit: false,
    eachMessage: async ({ partition, message }) => {
      // An update that cannot be read or used is told, and the last good one is kept.
      try {
        const update = updates.take(message.headers ?? {}, message.value);
        if (update) onUpdate(update);
      } catch (error) {
        onError(`partition ${partition}, offset ${message.offset}: ${error.message}`);
      }
    },
  });
  return consumer;
}

// Turns the records of a topic, one by one, into the updates of a model.
export class UpdateReader {
  #rank = [0n, 0n];
  #chunks = new Map(); // By rank and checksum: chunks of two writers never mix.
  #chain = null; // The last update, if changes may follow: its rank, its parameters, the checksum up to it.
  #isGapTold = false;

  constructor(model) {
    this.model = model;
  }

  // Returns the update that this record completes, or null. Throws for a record that it cannot read.
  take(headers, value) {
    const text = (name) => headers[name]?.toString();
    if (value === null || text("model") !== this.model) return null; // Also records that delete old chunks.
    if (!FORMATS.includes(text("format") ?? "1")) {
      throw new Error(`expected format ${FORMATS.join(" or ")}, given ${text("format")}`);
    }
    const rank = [BigInt(text("generation")), BigInt(text("version"))];
    if (!isNewer(rank, this.#rank)) return null;
    const whole = text("chunk_index") === undefined ? value : this.#join(rank, text, value);
    if (whole === null) return null;
    const isChange = text("format") === "4";
    if (isChange && !this.#isNext(text)) return null;
    const checksum = text("chain") && sha256(Buffer.from(isChange ? this.#chain.checksum : "", "hex"), whole);
    if (checksum !== text("chain")) throw new Error("a damaged update, or a change of another one");
    const { changes, ...document } = decode(text("content_type"), whole);
    // Before its rank counts: otherwise no later update would be newer than a damaged one.
    const isOf = document.model === this.model && `${document.generation}.${document.version}` === rank.join(".");
    if (!isOf || (isChange ? changes : document.parameters) === undefined) {
      throw new Error("a damaged document, or that of another update");
    }
    if (isChange) document.parameters = applied(this.#chain.parameters, changes);
    this.#chain = checksum ? { rank: rank.join("."), parameters: document.parameters, checksum } : null;
    this.#isGapTold = false;
    this.#rank = rank;
    for (const [key, set] of this.#chunks) if (!isNewer(set.rank, rank)) this.#chunks.delete(key);
    return { generation: Number(rank[0]), version: Number(rank[1]), createdAt: Number(text("created_at")), document };
  }

  // Whether the last update is the one that a change applies to. Throws if it is not, once for all changes of a gap.
  #isNext(text) {
    if (this.#chain?.rank === text("follows")) return true;
    if (this.#isGapTold || this.#rank[0] === 0n) return false; // A reader that starts late begins with a whole update.
    this.#isGapTold = true;
    throw new Error(`a change of ${text("follows")}, given ${this.#rank.join(".")}: waiting for a whole update`);
  }

  #join(rank, text, value) {
    const key = `${rank.join(".")} ${text("sha256")}`;
    const set = this.#chunks.get(key) ?? { rank, parts: new Map() };
    this.#chunks.set(key, set);
    const count = Number(text("chunk_count"));
    set.parts.set(Number(text("chunk_index")), value);
    if (set.parts.size < count) return null;
    this.#chunks.delete(key);
    const whole = Buffer.concat(Array.from({ length: count }, (_, index) => set.parts.get(index)));
    if (sha256(whole) !== text("sha256")) throw new Error("damaged chunks");
    return whole;
  }
}

function sha256(...parts) {
  return createHash("sha256").update(Buffer.concat(parts)).digest("hex");
}

function isNewer([generation, version], [otherGeneration, otherVersion]) {
  return generation > otherGeneration || (generation === otherGeneration && version > otherVersion);
}

function decode(contentType, value) {
  if (contentType === "application/json") return plain(parsed(value.toString()), {});
  if (contentType !== "application/vnd.safetensors") throw new Error(`unknown content type ${contentType}`);
  const length = Number(value.readBigUInt64LE(0));
  const { __metadata__: metadata, ...tensors } = JSON.parse(value.subarray(8, 8 + length));
  const data = value.subarray(8 + length);
  return plain(JSON.parse(metadata["streamiter.model_update"]), { tensors, data });
}

const READERS = {
  F64: [8, (data, at) => data.readDoubleLE(at)],
  F32: [4, (data, at) => data.readFloatLE(at)],
  I64: [8, (data, at) => exact(data.readBigInt64LE(at))],
  I32: [4, (data, at) => data.readInt32LE(at)],
  U8: [1, (data, at) => data[at]],
};

// A number, or a BigInt where a number would be rounded.
function exact(whole) {
  return Number.isSafeInteger(Number(whole)) ? Number(whole) : whole;
}

function tensor({ tensors, data }, name) {
  const { dtype, shape, data_offsets: [start, end] } = tensors[name];
  if (!(dtype in READERS)) throw new Error(`tensor ${name} has the type ${dtype}, which is not read here`);
  const [size, read] = READERS[dtype];
  return shaped(Array.from({ length: (end - start) / size }, (_, index) => read(data, start + index * size)), shape);
}

function shaped(values, shape) {
  if (shape.length === 0) return values[0];
  if (shape.length === 1) return values;
  const size = values.length / shape[0];
  return Array.from({ length: shape[0] }, (_, row) => shaped(values.slice(row * size, (row + 1) * size), shape.slice(1)));
}

// Replaces the tags of values that JSON cannot tell apart; arrays become nested lists.
function plain(node, file) {
  if (node === null || typeof node !== "object" || Array.isArray(node)) return node;
  const has = (...names) => Object.keys(node).sort().join() === names.join();
  if (has("tensor")) return tensor(file, node.tensor);
  if (has("dtype", "shape", "values")) return shaped(node.values, node.shape);
  if (has("dtype", "value")) return node.value;
  if (has("list") || has("tuple")) return Object.values(node)[0].map((part) => plain(part, file));
  if (has("bytes")) return Buffer.from(node.bytes, "base64");
  const fields = has("dict") ? node.dict : node;
  return Object.fromEntries(Object.entries(fields).map(([name, part]) => [name, plain(part, file)]));
}
