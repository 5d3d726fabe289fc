import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Iterator;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.common.header.Headers;

/** Turns the records of a topic, one by one, into the updates of a model. docs/model-updates.md describes the format. */
final class UpdateReader {
  /** A generation and a version, which order the updates of a model. */
  record Rank(long generation, long version) implements Comparable<Rank> {
    public int compareTo(Rank other) {
      int byGeneration = Long.compare(generation, other.generation);
      return byGeneration != 0 ? byGeneration : Long.compare(version, other.version);
    }
  }

  /** An update: model, generation, version, epoch, records, metrics and parameters; arrays are nested lists. */
  record Update(Rank rank, long createdAt, JsonNode document) {}

  private record ChunkSet(Rank rank, TreeMap<Integer, byte[]> parts) {}

  /** The last update, if changes may follow, and the checksum of all updates from the last whole one to it. */
  private record Chain(Rank rank, JsonNode parameters, String checksum) {}

  private static final ObjectMapper JSON = new ObjectMapper();
  private final String model;
  private final Map<String, ChunkSet> chunks = new HashMap<>(); // By rank and checksum: two writers never mix.
  private static final Rank NONE = new Rank(0, 0);
  private Rank newest = NONE;
  private Chain chain = null;
  private boolean isGapTold = false;

  UpdateReader(String model) {
    this.model = model;
  }

  /** Returns the update that this record completes, or null. Throws IOException for a record that it cannot read. */
  Update take(Headers headers, byte[] value) throws IOException {
    if (value == null || !model.equals(text(headers, "model"))) return null; // Also records that delete old chunks.
    String format = text(headers, "format");
    boolean isChange = "4".equals(format); // 2 is of models with tables, 3 of those with embeddings.
    boolean isKnown = format == null || Set.of("1", "2", "3", "4").contains(format);
    if (!isKnown) throw new IOException("expected format 1, 2, 3 or 4, given " + format);
    Rank rank = new Rank(number(headers, "generation"), number(headers, "version"));
    if (rank.compareTo(newest) <= 0) return null;
    byte[] whole = text(headers, "chunk_index") == null ? value : join(headers, rank, value);
    if (whole == null) return null;
    if (isChange && !isNext(text(headers, "follows"))) return null;
    String expected = text(headers, "chain");
    String checksum = expected == null ? null : sha256(isChange ? chain.checksum : "", whole);
    if (checksum != null && !checksum.equals(expected)) {
      throw new IOException("a damaged update, or a change of another one");
    }
    JsonNode document = decode(text(headers, "content_type"), whole);
    // Before its rank counts: otherwise no later update would be newer than a damaged one.
    Rank own = new Rank(document.path("generation").asLong(), document.path("version").asLong());
    boolean isOf = document.path("model").asText().equals(model) && own.equals(rank);
    if (!isOf || !document.has(isChange ? "changes" : "parameters")) {
      throw new IOException("a damaged document, or that of another update");
    }
    if (isChange) {
      JsonNode changes = ((ObjectNode) document).remove("changes");
      ((ObjectNode) document).set("parameters", Changes.applied(chain.parameters, changes));
    }
    Update update = new Update(rank, number(headers, "created_at"), document);
    chain = checksum == null ? null : new Chain(rank, document.get("parameters"), checksum);
    isGapTold = false;
    newest = rank;
    chunks.values().removeIf(set -> set.rank.compareTo(rank) <= 0);
    return update;
  }

  /** Whether the last update is the one that a change applies to. Throws if not, once for all changes of a gap. */
  private boolean isNext(String follows) throws IOException {
    if (chain != null && follows.equals(shown(chain.rank))) return true;
    if (isGapTold || newest.equals(NONE)) return false; // A reader that starts late begins with a whole update.
    isGapTold = true;
    throw new IOException("a change of " + follows + ", given " + shown(newest) + ": waiting for a whole update");
  }

  private static String shown(Rank rank) {
    return rank.generation + "." + rank.version;
  }

  private static String sha256(String before, byte[] value) {
    try {
      MessageDigest digest = MessageDigest.getInstance("SHA-256");
      digest.update(HexFormat.of().parseHex(before));
      return HexFormat.of().formatHex(digest.digest(value));
    } catch (NoSuchAlgorithmException impossible) {
      throw new AssertionError(impossible);
    }
  }

  private byte[] join(Headers headers, Rank rank, byte[] value) throws IOException {
    String sha256 = text(headers, "sha256");
    String key = rank + sha256;
    ChunkSet set = chunks.computeIfAbsent(key, unused -> new ChunkSet(rank, new TreeMap<>()));
    set.parts.put((int) number(headers, "chunk_index"), value);
    if (set.parts.size() < number(headers, "chunk_count")) return null;
    chunks.remove(key);
    ByteArrayOutputStream joined = new ByteArrayOutputStream();
    for (byte[] part : set.parts.values()) joined.write(part);
    if (!sha256("", joined.toByteArray()).equals(sha256)) throw new IOException("damaged chunks");
    return joined.toByteArray();
  }

  private static String text(Headers headers, String name) {
    var header = headers.lastHeader(name);
    return header == null ? null : new String(header.value(), StandardCharsets.UTF_8);
  }

  private static long number(Headers headers, String name) throws IOException {
    try {
      return Long.parseLong(text(headers, name));
    } catch (NumberFormatException error) {
      throw new IOException("expected the header " + name + " as a number", error);
    }
  }

  private static JsonNode decode(String contentType, byte[] value) throws IOException {
    if (contentType.equals("application/json")) return plain(JSON.readTree(value), null, null);
    if (!contentType.equals("application/vnd.safetensors")) throw new IOException("unknown type " + contentType);
    ByteBuffer bytes = ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN);
    int length = (int) bytes.getLong(0);
    JsonNode tensors = JSON.readTree(value, 8, length);
    ByteBuffer data = bytes.slice(8 + length, value.length - 8 - length).order(ByteOrder.LITTLE_ENDIAN);
    return plain(JSON.readTree(tensors.at("/__metadata__/streamiter.model_update").asText()), tensors, data);
  }

  /** Replaces the tags of values that JSON cannot tell apart; arrays become nested lists. */
  private static JsonNode plain(JsonNode node, JsonNode tensors, ByteBuffer data) throws IOException {
    if (!node.isObject()) return node;
    if (node.size() == 1 && node.has("tensor")) return tensor(tensors.get(node.get("tensor").asText()), data);
    if (node.size() == 3 && node.has("dtype") && node.has("shape") && node.has("values")) {
      return shaped(node.get("values").elements(), node.get("shape"), 0);
    }
    if (node.size() == 2 && node.has("dtype") && node.has("value")) return node.get("value");
    if (node.size() == 1 && node.has("bytes")) return node.get("bytes");
    if (node.size() == 1 && (node.has("list") || node.has("tuple"))) {
      ArrayNode parts = JsonNodeFactory.instance.arrayNode();
      for (JsonNode part : node.elements().next()) parts.add(plain(part, tensors, data));
      return parts;
    }
    ObjectNode fields = JsonNodeFactory.instance.objectNode();
    for (var field : (node.size() == 1 && node.has("dict") ? node.get("dict") : node).properties()) {
      fields.set(field.getKey(), plain(field.getValue(), tensors, data));
    }
    return fields;
  }

  private static JsonNode tensor(JsonNode tensor, ByteBuffer data) throws IOException {
    ArrayNode values = JsonNodeFactory.instance.arrayNode();
    String dtype = tensor.get("dtype").asText();
    int start = tensor.at("/data_offsets/0").asInt();
    int end = tensor.at("/data_offsets/1").asInt();
    for (int at = start; at < end; ) {
      switch (dtype) {
        case "F64" -> values.add(data.getDouble(at));
        case "F32" -> values.add(data.getFloat(at));
        case "I32" -> values.add(data.getInt(at));
        case "I64" -> values.add(data.getLong(at));
        case "U8" -> values.add(data.get(at) & 0xff);
        default -> throw new IOException("a tensor has the type " + dtype + ", which is not read here");
      }
      at += dtype.equals("U8") ? 1 : dtype.endsWith("32") ? 4 : 8;
    }
    return shaped(values.elements(), tensor.get("shape"), 0);
  }

  private static JsonNode shaped(Iterator<JsonNode> values, JsonNode shape, int axis) {
    if (axis == shape.size()) return values.next();
    ArrayNode parts = JsonNodeFactory.instance.arrayNode();
    for (int index = 0; index < shape.get(axis).asInt(); index++) parts.add(shaped(values, shape, axis + 1));
    return parts;
  }
}
