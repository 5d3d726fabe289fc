import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** ModelConsumer BROKER TOPIC MODEL: prints each update, and a prediction for each row (JSON) of standard input. */
public final class ModelConsumer {
  private record Current(UpdateReader.Rank rank, LinearModel model) {}

  private static final ObjectMapper JSON = new ObjectMapper();
  private static volatile Current current;

  public static void main(String[] arguments) throws IOException {
    Thread following = new Thread(() -> follow(arguments[0], arguments[1], arguments[2]), "follow");
    following.setDaemon(true);
    following.start();
    BufferedReader rows = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = rows.readLine(); line != null; line = rows.readLine()) {
      Current now = current; // An answer is of one version.
      System.out.println(now == null ? JSON.createObjectNode().put("error", "no model yet") : answer(now, line));
    }
  }

  /** A wrong row gets an error, and the next row a prediction. */
  private static ObjectNode answer(Current now, String line) {
    ObjectNode answer = named(now.rank);
    if (now.model.positive() != null) answer.set("positive", now.model.positive());
    try {
      answer.set("prediction", now.model.predict(JSON.readTree(line)));
    } catch (IOException | IllegalArgumentException error) {
      answer.put("error", error.getMessage());
    } catch (RuntimeException error) { // A row of a kind that the model does not take.
      answer.put("error", error.toString());
    }
    return answer;
  }

  private static void follow(String broker, String topic, String model) {
    UpdateReader updates = new UpdateReader(model);
    // All partitions from the beginning, without a group; records of aborted transactions are left out.
    Map<String, Object> options = Map.of("bootstrap.servers", broker, "isolation.level", "read_committed");
    ByteArrayDeserializer bytes = new ByteArrayDeserializer();
    try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(options, bytes, bytes)) {
      consumer.assign(
          consumer.partitionsFor(topic).stream().map(each -> new TopicPartition(topic, each.partition())).toList());
      consumer.seekToBeginning(consumer.assignment());
      while (true) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(500))) take(updates, record);
      }
    }
  }

  private static void take(UpdateReader updates, ConsumerRecord<byte[], byte[]> record) {
    try {
      UpdateReader.Update update = updates.take(record.headers(), record.value());
      if (update == null) return;
      current = new Current(update.rank(), new LinearModel(update.document().get("parameters")));
      JsonNode metrics = update.document().get("metrics");
      System.out.println(named(update.rank()).set("metrics", metrics));
    } catch (IOException | RuntimeException error) { // Whatever is in a record: following goes on.
      System.err.printf("partition %d, offset %d: %s%n", record.partition(), record.offset(), error);
    }
  }

  private static ObjectNode named(UpdateReader.Rank rank) {
    return JSON.createObjectNode().put("generation", rank.generation()).put("version", rank.version());
  }
}
