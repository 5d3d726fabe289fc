import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** Computes the scores of the embeddings of a published model, as docs/model-updates.md describes it. */
final class Embeddings {
  private static final int HASH_BITS = 52;
  private static final double DEVIATIONS = 10.0; // The limit of a numeric column is so many deviations.

  /** A text of a field, or a missing value, whose field is null; with its hash of 64 bits. */
  record Feature(String field, long hash) {}

  private record Known(int field, Integer position, Integer row) {}

  private record Layer(double[][] weights, double[] bias) {}

  /** The numbers of an expert for one score. */
  private record Head(
      int place, double[] weights, double[][] vectors, double[][] commons, double[] earlySteps, double[][] numbers,
      boolean products, List<Layer> layers, double intercept) {}

  private final Map<String, Integer> numberOf = new HashMap<>();
  private final Map<Long, Integer> positions = new HashMap<>(); // By key.
  private final Map<Long, Integer> rows = new HashMap<>(); // By key.
  private final double[][] early; // What features without a vector have learned: 4 bits for each expert.
  private final int count; // The number of scores of an expert.
  private final double scale;
  private final List<Head> heads = new ArrayList<>();

  /** The shares of the experts in the mixture. */
  final List<Double> shares = new ArrayList<>();

  /** Throws IllegalArgumentException for a kind that only a newer consumer knows. */
  Embeddings(JsonNode given) {
    String kind = given.get("kind").asText();
    if (!Set.of("fm", "deepfm", "wide and deep").contains(kind)) {
      throw new IllegalArgumentException("embeddings of the kind " + kind + ", which only a newer consumer knows");
    }
    numberOf.put(null, 0);
    for (JsonNode field : given.get("text_fields")) numberOf.put(field.asText(), numberOf.size());
    for (JsonNode key : given.get("keys")) positions.put(key.asLong(), positions.size());
    for (JsonNode key : given.get("admitted")) rows.put(key.asLong(), rows.size());
    early = LinearModel.matrix(given.get("early"));
    scale = given.get("scale").asDouble();
    count = given.path("scores").asInt(1);
    for (JsonNode expert : given.get("experts")) {
      List<Layer> layers = new ArrayList<>();
      for (JsonNode layer : expert.get("layers")) {
        layers.add(new Layer(LinearModel.matrix(layer.get("weights")), LinearModel.numbers(layer.get("bias"))));
      }
      if (heads.size() % count == 0) shares.add(expert.get("share").asDouble());
      heads.add(
          new Head(
              heads.size(), LinearModel.numbers(expert.get("weights")), LinearModel.matrix(expert.get("vectors")),
              LinearModel.matrix(expert.get("commons")), LinearModel.numbers(expert.get("early_steps")),
              LinearModel.matrix(expert.get("numbers")),
              expert.get("products").asBoolean(), layers, expert.get("intercept").asDouble()));
    }
  }

  /**
   * Returns the scores of each expert for a row, one or one for each class: of its features, and of the distances of the
   * linear model's fields from their centers, with their limits.
   */
  double[][] scores(List<Feature> features, double[] distances, double[] limits) {
    List<Known> known = new ArrayList<>();
    for (Feature feature : features) {
      Integer field = numberOf.get(feature.field);
      if (field == null) continue;
      long key = (long) field << HASH_BITS | feature.hash & ((1L << HASH_BITS) - 1);
      known.add(new Known(field, positions.get(key), rows.get(key)));
    }
    double[] deviations = new double[distances.length];
    for (int column = 0; column < deviations.length; column++) {
      if (limits[column] > 0.0) deviations[column] = DEVIATIONS * distances[column] / limits[column];
    }
    double[][] scores = new double[shares.size()][count];
    for (Head head : heads) {
      scores[head.place / count][head.place % count] = head.intercept + scale * sum(head, known, deviations);
    }
    return scores;
  }

  private double sum(Head head, List<Known> features, double[] deviations) {
    int factors = head.commons[0].length;
    double[][] terms = new double[head.commons.length + deviations.length][1 + factors];
    pool(head, features, terms);
    double[] inputs = new double[head.commons.length * factors + deviations.length];
    for (int field = 0; field < head.commons.length; field++) {
      System.arraycopy(terms[field], 1, inputs, field * factors, factors);
    }
    for (int column = 0; column < deviations.length; column++) {
      add(head.numbers[column], deviations[column], terms[head.commons.length + column]);
      inputs[head.commons.length * factors + column] = deviations[column];
    }
    double[] total = new double[1 + factors];
    for (double[] term : terms) add(term, 1.0, total);
    double sum = total[0];
    if (head.products) sum += 0.5 * (squares(total) - Arrays.stream(terms).mapToDouble(Embeddings::squares).sum());
    return head.layers.isEmpty() ? sum : sum + throughLayers(head.layers, inputs);
  }

  /** Fills in the mean of the weights and vectors of each field's features; 0 without a feature. */
  private void pool(Head head, List<Known> features, double[][] terms) {
    int[] counts = new int[head.commons.length];
    for (Known feature : features) counts[feature.field]++;
    for (Known feature : features) {
      double share = 1.0 / counts[feature.field];
      double[] term = terms[feature.field];
      double[] vector = feature.row == null ? commonVector(head, feature) : head.vectors[feature.row];
      if (feature.position != null) term[0] += share * head.weights[feature.position];
      for (int factor = 0; factor < vector.length; factor++) term[1 + factor] += share * vector[factor];
    }
  }

  /** Returns the vector of a feature without its own: the common one, and a step for each 4 bits of what it has learned. */
  private double[] commonVector(Head head, Known feature) {
    double[] vector = head.commons[feature.field].clone();
    if (feature.position == null || early.length == 0) return vector;
    int first = head.place % count * vector.length;
    for (int factor = 0; factor < vector.length; factor++) {
      int bits = (int) early[feature.position][first + factor] >> 4 * (head.place / count) & 15;
      vector[factor] += head.earlySteps[bits];
    }
    return vector;
  }

  private static double throughLayers(List<Layer> layers, double[] inputs) {
    double[] values = inputs;
    for (int number = 0; number < layers.size(); number++) {
      double[] sums = layers.get(number).bias.clone();
      for (int input = 0; input < values.length; input++) add(layers.get(number).weights[input], values[input], sums);
      boolean isLast = number == layers.size() - 1;
      for (int output = 0; output < sums.length && !isLast; output++) sums[output] = Math.max(sums[output], 0.0);
      values = sums;
    }
    return values[0];
  }

  /** The squares of a vector, without its weight. */
  private static double squares(double[] term) {
    double sum = 0.0;
    for (int factor = 1; factor < term.length; factor++) sum += term[factor] * term[factor];
    return sum;
  }

  private static void add(double[] values, double factor, double[] sums) {
    for (int index = 0; index < sums.length; index++) sums[index] += factor * values[index];
  }
}
