import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Stream;

/**
 * Java's own HTTP client by its default settings, with which every request in the clear offers an upgrade to HTTP/2. It says "ready"; then
 * each line in is a URL and a body, and out come the status, each line of the answer behind a "|", and a full stop.
 */
class Lines {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] ask = line.split(" ", 2);
            HttpRequest request = HttpRequest.newBuilder(URI.create(ask[0]))
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(ask[1]))
                .build();
            HttpResponse<Stream<String>> answer = client.send(request, HttpResponse.BodyHandlers.ofLines());
            System.out.println(answer.statusCode());
            answer.body().forEach(text -> System.out.println("|" + text));
            System.out.println(".");
        }
    }
}
