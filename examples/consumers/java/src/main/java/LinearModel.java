import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;

/**
 * Predicts with the parameters of a published linear model, or of one with tables or embeddings, with the same numbers
 * as LinearPredictor in Python.
 */
final class LinearModel {
  private static final int TEXT_FOLLOWS = 0xff;
  private static final int IS_MISSING = 0xfe;
  private static final double HUGE = 1e100; // Larger numbers count as missing.
  private static final double SCORE_MAX = 30.0;

  /**
   * A row as tables and embeddings see it: numbers, distances from the centers, positions of texts among the places, and
   * features.
   */
  private record Seen(
      Map<String, Double> numbers, double[] distances, TreeSet<Integer> places, List<Embeddings.Feature> features) {}

  private final JsonNode parameters;
  private final boolean isStandardized;
  private final String link;
  private final double[] intercepts;
  private final double[][] weights; // By column, then by score.
  private final Map<String, Integer> columns = new HashMap<>();
  private final Map<Long, Integer> hashed = new HashMap<>();
  private final Set<String> texts = new HashSet<>();
  private final Set<String> vectors = new HashSet<>();
  private final Fields prepared;
  private final double[] mixture; // The weights of the linear member, then of those with tables.
  private Tables tables;
  private Embeddings embeddings;

  LinearModel(JsonNode given) {
    parameters = given.isArray() ? JsonNodeFactory.instance.objectNode().set("weights", given) : given;
    // Of crosses, of sparse rows, and of clusters, which have weights, too.
    for (String beyond : List.of("crosses", "width", "centroids")) {
      if (!parameters.has(beyond)) continue;
      throw new IllegalArgumentException("a model with " + beyond + ", which only the predictor in Python has");
    }
    isStandardized = parameters.has("center");
    prepared = new Fields(parameters);
    link = parameters.path("link").asText("identity");
    JsonNode intercept = parameters.path("intercept");
    intercepts = intercept.isArray() ? numbers(intercept) : new double[] {intercept.asDouble(0.0)};
    JsonNode columnWeights = parameters.get("weights");
    weights = new double[columnWeights.size()][];
    for (int column = 0; column < weights.length; column++) {
      JsonNode weight = columnWeights.get(column);
      weights[column] = weight.isArray() ? numbers(weight) : new double[] {weight.asDouble()};
    }
    if (isStandardized) {
      JsonNode fields = parameters.get("fields");
      for (int column = 0; column < fields.size(); column++) {
        String name = fields.get(column).asText();
        columns.put(name, column);
        if (name.endsWith("]")) vectors.add(name.substring(0, name.lastIndexOf('[')));
      }
      JsonNode places = parameters.get("places");
      for (int index = 0; index < places.size(); index++) hashed.put(places.get(index).asLong(), fields.size() + index);
      for (JsonNode field : parameters.get("text_fields")) texts.add(field.asText());
    }
    JsonNode shapes = parameters.get("shapes");
    mixture = shapes == null ? new double[] {1.0} : numbers(shapes.get("mixture"));
    if (shapes != null) tables = new Tables(shapes);
    if (parameters.has("embeddings")) embeddings = new Embeddings(parameters.get("embeddings"));
  }

  /**
   * Returns the prediction for a row, a number; for classes an object of labels and probabilities. Throws
   * IllegalArgumentException for a row that does not fit the model.
   */
  JsonNode predict(JsonNode row) {
    double[] sums = intercepts.clone();
    Seen seen = new Seen(new HashMap<>(), new double[columns.size()], new TreeSet<>(), new ArrayList<>());
    if (isStandardized) {
      if (!row.isObject()) throw new IllegalArgumentException("expected a row of named fields");
      prepared.of(row).forEach((name, value) -> addField(name, value, sums, seen));
    } else {
      boolean fits = row.isArray() && row.size() == weights.length;
      for (JsonNode value : row) fits &= value.isNumber();
      if (!fits) throw new IllegalArgumentException("expected a row of " + weights.length + " numbers");
      for (int column = 0; column < row.size(); column++) sums[0] += weights[column][0] * scaled(row, column);
    }
    List<double[]> members = new ArrayList<>(List.of(sums));
    if (tables != null) members.addAll(tables.scores(seen.numbers, seen.distances, seen.places));
    double[] mixed = new double[sums.length];
    for (int member = 0; member < mixture.length; member++) {
      double[] predicted = linked(members.get(member));
      for (int score = 0; score < mixed.length; score++) mixed[score] += mixture[member] * predicted[score];
    }
    if (embeddings != null) {
      double[] limits = numbers(parameters.get("limit"));
      double[][] scores = embeddings.scores(seen.features, seen.distances, limits);
      double rest = 1.0 - embeddings.shares.stream().mapToDouble(share -> share).sum();
      for (int score = 0; score < mixed.length; score++) mixed[score] *= rest;
      for (int expert = 0; expert < scores.length; expert++) {
        double[] predicted = linked(scores[expert]);
        for (int score = 0; score < mixed.length; score++) {
          mixed[score] += embeddings.shares.get(expert) * predicted[score];
        }
      }
    }
    return link.equals("softmax") ? labelled(mixed) : JsonNodeFactory.instance.numberNode(mixed[0]);
  }

  private double[] linked(double[] sums) {
    if (link.equals("softmax")) return softmax(sums);
    double score = sums[0];
    double number =
        switch (link) {
          case "identity" -> score;
          case "clipped" -> clip(score, number("lowest"), number("highest"));
          case "log" -> {
            double mean = Math.exp(Math.min(score, 700.0));
            yield isStandardized ? clip(mean, number("lowest"), number("highest")) : mean;
          }
          case "logit" -> sigmoid(isStandardized ? clip(score, -SCORE_MAX, SCORE_MAX) : score);
          default -> throw new IllegalArgumentException("unknown link " + link);
        };
    return new double[] {number};
  }

  /** The label that a prediction is the probability of, if there are two labels that are no truth values; or null. */
  JsonNode positive() {
    return link.equals("logit") ? parameters.path("classes").get(1) : null;
  }

  private double scaled(JsonNode row, int column) {
    double value = row.get(column).asDouble();
    if (!parameters.has("deviation")) return value;
    double deviation = parameters.get("deviation").get(column).asDouble();
    return deviation > 0.0 ? (value - parameters.get("mean").get(column).asDouble()) / deviation : 0.0;
  }

  /** A list of numbers is a field for each of them; of a list of texts, each different text counts once. */
  private void addField(String name, JsonNode value, double[] sums, Seen seen) {
    if (!value.isArray()) {
      addValue(name, value, sums, seen);
      return;
    }
    Set<JsonNode> different = new LinkedHashSet<>();
    value.forEach(different::add);
    boolean areTexts = different.stream().allMatch(JsonNode::isTextual);
    if (areTexts) different.forEach(text -> addValue(name, text, sums, seen));
    if (!areTexts && !vectors.contains(name)) {
      refuseIfKnown(name);
      return;
    }
    for (int place = 0; place < value.size() && !areTexts; place++) {
      addValue(name + "[" + place + "]", value.get(place), sums, seen);
    }
  }

  private void refuseIfKnown(String name) {
    if (!columns.containsKey(name) && !texts.contains(name) && !vectors.contains(name)) return;
    throw new IllegalArgumentException("expected a number, a text or null in the field " + name);
  }

  private void addValue(String name, JsonNode value, double[] sums, Seen seen) {
    if (value.isContainerNode()) {
      refuseIfKnown(name);
      return;
    }
    double number = value.isBoolean() ? (value.asBoolean() ? 1.0 : 0.0) : value.asDouble();
    if (value.isNull() || (!value.isTextual() && !(Math.abs(number) <= HUGE))) {
      addHashed(name, IS_MISSING, "", sums, seen);
    } else if (value.isTextual()) {
      if (texts.contains(name)) addHashed(name, TEXT_FOLLOWS, value.asText(), sums, seen);
      else if (columns.containsKey(name)) throw new IllegalArgumentException("expected a number in the field " + name);
    } else {
      Integer column = columns.get(name);
      if (column == null && texts.contains(name)) {
        throw new IllegalArgumentException("expected a text in the field " + name);
      }
      if (column != null) {
        double limit = parameters.get("limit").get(column).asDouble();
        seen.numbers.put(name, number);
        seen.distances[column] = clip(number - parameters.get("center").get(column).asDouble(), -limit, limit);
        add(column, seen.distances[column], sums);
      }
    }
  }

  private void addHashed(String name, int separator, String text, double[] sums, Seen seen) {
    long hash = hashOf(name, separator, text);
    seen.features.add(new Embeddings.Feature(separator == IS_MISSING ? null : name, hash));
    Integer column = hashed.get(hash & ((1L << parameters.get("bits").asInt()) - 1)); // The place: its low bits.
    if (column == null) return;
    add(column, Math.min(1.0, parameters.get("limit").get(column).asDouble()), sums);
    seen.places.add(column - columns.size());
  }

  private void add(int column, double value, double[] sums) {
    for (int score = 0; score < sums.length; score++) sums[score] += weights[column][score] * value;
  }

  private static double[] softmax(double[] sums) {
    double highest = Arrays.stream(sums).max().orElseThrow();
    double total = Arrays.stream(sums).map(sum -> Math.exp(sum - highest)).sum();
    return Arrays.stream(sums).map(sum -> Math.exp(sum - highest) / total).toArray();
  }

  /** A last probability without a label is that of a class that has not come yet. */
  private ObjectNode labelled(double[] values) {
    ObjectNode probabilities = JsonNodeFactory.instance.objectNode();
    for (int score = 0; score < values.length; score++) {
      probabilities.put(parameters.get("classes").path(score).asText("(other)"), values[score]);
    }
    return probabilities;
  }

  /** 64 bits of FNV-1a, mixed. */
  static long hashOf(String name, int separator, String text) {
    long hash = 0xcbf29ce484222325L;
    for (byte each : name.getBytes(StandardCharsets.UTF_8)) hash = (hash ^ (each & 0xff)) * 0x100000001b3L;
    hash = (hash ^ separator) * 0x100000001b3L;
    for (byte each : text.getBytes(StandardCharsets.UTF_8)) hash = (hash ^ (each & 0xff)) * 0x100000001b3L;
    hash = (hash ^ (hash >>> 33)) * 0xff51afd7ed558ccdL;
    return hash ^ (hash >>> 33);
  }

  private double number(String name) {
    return parameters.get(name).asDouble();
  }

  private static double sigmoid(double score) {
    return score >= 0 ? 1.0 / (1.0 + Math.exp(-score)) : Math.exp(score) / (1.0 + Math.exp(score));
  }

  private static double clip(double value, double low, double high) {
    return Math.min(Math.max(value, low), high);
  }

  static double[][] matrix(JsonNode rows) {
    double[][] matrix = new double[rows.size()][];
    for (int row = 0; row < matrix.length; row++) matrix[row] = numbers(rows.get(row));
    return matrix;
  }

  static double[] numbers(JsonNode values) {
    double[] numbers = new double[values.size()];
    for (int index = 0; index < numbers.length; index++) numbers[index] = values.get(index).asDouble();
    return numbers;
  }
}
