import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.util.HashSet;
import java.util.Iterator;
import java.util.Set;

/** The operations of a change. docs/model-updates.md describes them. */
final class Changes {
  private Changes() {}

  /** Returns the parameters after a change; those before it stay as they are. */
  static JsonNode applied(JsonNode parameters, JsonNode changes) throws IOException {
    JsonNode after = parameters;
    for (JsonNode change : changes) after = changed(after, change, 0);
    return after;
  }

  private static JsonNode changed(JsonNode value, JsonNode change, int depth) throws IOException {
    JsonNode path = change.get("path");
    if (depth == path.size()) return result(value, change);
    JsonNode name = path.get(depth);
    if (path.size() == 1 && name.asText().equals("state")) return value; // It is for trainings only.
    if (value.isArray()) {
      ArrayNode parts = JsonNodeFactory.instance.arrayNode().addAll((ArrayNode) value);
      parts.set(name.asInt(), changed(value.get(name.asInt()), change, depth + 1));
      return parts;
    }
    ObjectNode fields = JsonNodeFactory.instance.objectNode();
    fields.setAll((ObjectNode) value);
    return fields.set(name.asText(), changed(value.get(name.asText()), change, depth + 1));
  }

  private static JsonNode result(JsonNode old, JsonNode change) throws IOException {
    if (change.has("value")) return change.get("value");
    if (change.has("names")) {
      ObjectNode fields = JsonNodeFactory.instance.objectNode();
      for (JsonNode name : change.get("names")) fields.set(name.asText(), old.get(name.asText()));
      return fields;
    }
    if (!change.has("rows")) throw new IOException("expected an operation of format 4, given " + change.fieldNames());
    Set<Integer> removed = rows(change.get("removed"));
    Set<Integer> inserted = rows(change.get("inserted"));
    ArrayNode array = JsonNodeFactory.instance.arrayNode();
    Iterator<JsonNode> kept = old.elements();
    int length = old.size() - removed.size() + inserted.size();
    for (int row = 0, before = 0; row < length; row++) {
      if (inserted.contains(row)) {
        array.addNull();
        continue;
      }
      for (; removed.contains(before); before++) kept.next();
      array.add(kept.next());
      before++;
    }
    for (int index = 0; index < change.get("rows").size(); index++) {
      array.set(change.get("rows").get(index).asInt(), change.get("values").get(index));
    }
    return array;
  }

  private static Set<Integer> rows(JsonNode given) {
    Set<Integer> rows = new HashSet<>();
    if (given != null) given.forEach(row -> rows.add(row.asInt()));
    return rows;
  }
}
