package octavo

// Against a running server, which tests/interop/test_go.py of the repository starts. It tells by environment:
//
//	OCTAVO_TEST_ADDRESS      the server's gRPC address
//	OCTAVO_TEST_API_KEY      the key that it asks for
//	OCTAVO_TEST_KILL_URL     a POST there kills the router, which is then started again
//	OCTAVO_TEST_TLS_ADDRESS  a server with TLS, of the same key; OCTAVO_TEST_TLS_ROOTS its authority's file

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	octavov1 "octavo/v1"
)

func liveClient(t *testing.T, settings ...Option) *Client {
	t.Helper()
	address := os.Getenv("OCTAVO_TEST_ADDRESS")
	if address == "" {
		t.Skip("no server: OCTAVO_TEST_ADDRESS is not set")
	}
	client, err := NewClient(address, append([]Option{WithAPIKey(os.Getenv("OCTAVO_TEST_API_KEY"))}, settings...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// long gives two samples of 240 tokens each, the same at every call: long enough that a router dies in the middle.
func long() *octavov1.GenerateRequest {
	ids := make([]uint32, 40)
	for index := range ids {
		ids[index] = uint32(index + 5)
	}
	return &octavov1.GenerateRequest{
		Prompt:   &octavov1.GenerateRequest_TokenIds{TokenIds: &octavov1.TokenIds{Ids: ids}},
		Sampling: &octavov1.SamplingParams{Temperature: proto.Float32(1), Seed: proto.Uint64(11), N: proto.Uint32(2)},
		Stop:     &octavov1.StopConditions{MaxTokens: proto.Uint32(240), IgnoreEos: true},
		Output:   &octavov1.OutputOptions{Logprobs: proto.Uint32(2)},
	}
}

func killRouter(t *testing.T) {
	t.Helper()
	answer, err := http.Post(os.Getenv("OCTAVO_TEST_KILL_URL"), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusNoContent {
		t.Fatalf("the router was not killed: %s", answer.Status)
	}
}

func waitIdle(t *testing.T, client *Client) {
	t.Helper()
	for try := 0; try < 500; try++ {
		state, err := client.State(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if state.GetQueue().GetRequestCount() == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("requests are left")
}

func generate(t *testing.T, client *Client) Output {
	t.Helper()
	output, err := client.Generate(context.Background(), long())
	if err != nil {
		t.Fatal(err)
	}
	return output
}

// checkSame compares the samples and what they took.
func checkSame(t *testing.T, output, expected Output) {
	t.Helper()
	if output.Usage.GetCompletionTokenCount() != 480 || expected.Usage.GetCompletionTokenCount() != 480 {
		t.Errorf("usage is %v and %v", output.Usage, expected.Usage)
	}
	if len(output.Samples) != 2 || len(expected.Samples) != 2 {
		t.Fatalf("there are %d and %d samples", len(output.Samples), len(expected.Samples))
	}
	for index, sample := range output.Samples {
		other := expected.Samples[index]
		same := sample.Text == other.Text && reflect.DeepEqual(sample.TokenIDs, other.TokenIDs) &&
			sample.FinishReason == other.FinishReason && sample.CumulativeLogprob == other.CumulativeLogprob &&
			len(sample.Logprobs) == len(other.Logprobs)
		for position := 0; same && position < len(sample.Logprobs); position++ {
			same = proto.Equal(sample.Logprobs[position], other.Logprobs[position])
		}
		if !same {
			t.Errorf("sample %d differs:\n%v\n%v", index, sample, other)
		}
	}
}

// checkDeltas compares what was handed out piece by piece with the whole.
func checkDeltas(t *testing.T, deltas []*octavov1.SampleDelta, expected Output) {
	t.Helper()
	for index, sample := range expected.Samples {
		var text strings.Builder
		var ids []uint32
		for _, delta := range deltas {
			if delta.GetSampleIndex() == uint32(index) {
				text.WriteString(delta.GetText())
				ids = append(ids, delta.GetTokenIds()...)
			}
		}
		if text.String() != sample.Text || !reflect.DeepEqual(ids, sample.TokenIDs) {
			t.Errorf("the deltas of sample %d are %q, %v", index, text.String(), ids)
		}
	}
}

func checkCode(t *testing.T, err error, code codes.Code) *Error {
	t.Helper()
	var failure *Error
	if !errors.As(err, &failure) || failure.Code != code {
		t.Fatalf("the error is %v; it must be %v", err, code)
	}
	return failure
}

func TestAStreamBringsWhatAWholeAnswerIs(t *testing.T) {
	client := liveClient(t)
	whole := generate(t, client)
	stream := client.Stream(context.Background(), long())
	defer stream.Close()
	var deltas []*octavov1.SampleDelta
	for stream.Next() {
		deltas = append(deltas, stream.Delta())
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if len(deltas) < 100 {
		t.Errorf("only %d deltas came", len(deltas))
	}
	checkSame(t, stream.Output(), whole)
	checkDeltas(t, deltas, whole)
}

func TestModelsTokensAndText(t *testing.T) {
	client, ctx := liveClient(t), context.Background()
	models, err := client.ListModels(ctx)
	if err != nil || len(models) != 1 || models[0].GetMaxModelLen() != 512 {
		t.Fatalf("models are %v, %v", models, err)
	}
	tokens, err := client.Tokenize(ctx, &octavov1.TokenizeRequest{
		Input:            &octavov1.TokenizeRequest_Text{Text: "hello"},
		AddSpecialTokens: proto.Bool(false),
	})
	if err != nil {
		t.Fatal(err)
	}
	text, err := client.Detokenize(ctx, &octavov1.DetokenizeRequest{TokenIds: tokens.GetTokenIds()})
	if err != nil || text != "hello" {
		t.Fatalf("text is %q, %v", text, err)
	}
}

func TestADeadlineEndsARequest(t *testing.T) {
	client := liveClient(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	stream := client.Stream(ctx, long())
	for stream.Next() {
	}
	checkCode(t, stream.Err(), codes.DeadlineExceeded)
	_, err := client.Generate(ctx, long())
	checkCode(t, err, codes.DeadlineExceeded)
	waitIdle(t, client)
}

func TestCancellingAndClosingCancelOnTheServer(t *testing.T) {
	client := liveClient(t)
	ctx, cancel := context.WithCancel(context.Background())
	stream := client.Stream(ctx, long())
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	for stream.Next() {
	}
	checkCode(t, stream.Err(), codes.Canceled)
	stream = client.Stream(context.Background(), long())
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	stream.Close()
	if stream.Next() || stream.Err() != nil {
		t.Errorf("a closed stream goes on, or failed: %v", stream.Err())
	}
	waitIdle(t, client)
}

func TestErrorsCarryTheServersCodeReasonAndField(t *testing.T) {
	client := liveClient(t)
	request := long()
	request.Sampling.Temperature = proto.Float32(9)
	_, err := client.Generate(context.Background(), request)
	failure := checkCode(t, err, codes.InvalidArgument)
	if failure.Reason != "INVALID_REQUEST" || failure.Field != "sampling.temperature" {
		t.Errorf("reason is %q and field %q", failure.Reason, failure.Field)
	}
	other := liveClient(t, WithAPIKey("another"))
	_, err = other.ListModels(context.Background())
	checkCode(t, err, codes.Unauthenticated)
}

func TestNobodyAtTheAddressIsToldWithTheAddress(t *testing.T) {
	client, err := NewClient("127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, err = client.Generate(context.Background(), long())
	failure := checkCode(t, err, codes.Unavailable)
	if !strings.Contains(failure.Message, "cannot reach an Octavo server at 127.0.0.1:1") {
		t.Error(failure.Message)
	}
}

func TestAStreamAndAWholeAnswerOutliveTheirRouterTwice(t *testing.T) {
	client := liveClient(t)
	expected := generate(t, client)
	whole := make(chan Output)
	go func() {
		output, err := client.Generate(context.Background(), long())
		if err != nil {
			t.Error(err)
		}
		whole <- output
	}()
	stream := client.Stream(context.Background(), long())
	defer stream.Close()
	kills := []int{60, 300}
	tokens := 0
	var deltas []*octavov1.SampleDelta
	for stream.Next() {
		deltas = append(deltas, stream.Delta())
		tokens += len(stream.Delta().GetTokenIds())
		if len(kills) > 0 && tokens >= kills[0] {
			kills = kills[1:]
			killRouter(t)
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if len(kills) > 0 {
		t.Error("the router was not killed twice")
	}
	checkSame(t, stream.Output(), expected)
	checkDeltas(t, deltas, expected)
	checkSame(t, <-whole, expected)
}

func TestWithoutResumptionALostServerIsAnErrorAndOneThatIsWaitedForComesBack(t *testing.T) {
	client := liveClient(t, WithResumeTimeout(0))
	stream := client.Stream(context.Background(), long())
	defer stream.Close()
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	killRouter(t)
	for stream.Next() {
	}
	checkCode(t, stream.Err(), codes.Unavailable)
	_, err := client.Generate(context.Background(), long())
	checkCode(t, err, codes.Unavailable)
	patient := liveClient(t, WithWaitForServer())
	if output := generate(t, patient); output.Usage.GetCompletionTokenCount() != 480 {
		t.Errorf("usage is %v", output.Usage)
	}
}

func TestTLS(t *testing.T) {
	address := os.Getenv("OCTAVO_TEST_TLS_ADDRESS")
	if address == "" {
		t.Skip("no server with TLS: OCTAVO_TEST_TLS_ADDRESS is not set")
	}
	pem, err := os.ReadFile(os.Getenv("OCTAVO_TEST_TLS_ROOTS"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	for _, trusted := range []bool{true, false} {
		config := &tls.Config{}
		if trusted {
			config.RootCAs = roots
		}
		client, err := NewClient(address, WithAPIKey(os.Getenv("OCTAVO_TEST_API_KEY")), WithTLS(config))
		if err != nil {
			t.Fatal(err)
		}
		models, err := client.ListModels(context.Background())
		if trusted && (err != nil || len(models) != 1) {
			t.Errorf("models are %v, %v", models, err)
		}
		if !trusted {
			checkCode(t, err, codes.Unavailable)
		}
		client.Close()
	}
}
