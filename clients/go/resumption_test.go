package octavo

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	octavov1 "octavo/v1"
)

var (
	unavailable = &Error{Code: codes.Unavailable}
	overloaded  = &Error{Code: codes.ResourceExhausted, RetryAfter: 700 * time.Millisecond}
	invalid     = &Error{Code: codes.InvalidArgument}
)

// tries is a request without a server, at a time that only the test moves.
type tries struct {
	*resumption
	time time.Time
}

func newTries(options options) *tries {
	request := prepared(&octavov1.GenerateRequest{Prompt: &octavov1.GenerateRequest_Text{Text: "hé"}}, false)
	if options.resumeTimeout == 0 {
		options.resumeTimeout = 10 * time.Second
	}
	made := &tries{time: time.Unix(1000, 0)}
	made.resumption = newResumption(request, newOutputBuilder(request), &options)
	made.now = func() time.Time { return made.time }
	return made
}

func TestARequestThatNobodyHasTakenOnIsNotSentAgain(t *testing.T) {
	for _, try := range []struct {
		options  options
		err      *Error
		accepted bool
		again    bool
	}{
		{options{}, unavailable, false, false},
		{options{}, invalid, true, false},
		{options{}, unavailable, true, true},
		{options{waitForServer: true}, unavailable, false, true},
	} {
		if _, again := newTries(try.options).delayAfter(try.err, try.accepted); again != try.again {
			t.Errorf("%v, accepted %v: sent again is %v", try.err, try.accepted, again)
		}
	}
}

func TestDelaysDoubleUpToASecondAndEndWithTheTimeToResume(t *testing.T) {
	tries := newTries(options{})
	tries.progressed()
	for _, most := range []time.Duration{50, 100, 200, 400, 800, 1000, 1000} {
		most *= time.Millisecond
		if delay, again := tries.delayAfter(unavailable, false); !again || delay < most/2 || delay > most {
			t.Errorf("delay is %v, %v; it must be between half of and %v", delay, again, most)
		}
	}
	tries.time = tries.time.Add(10 * time.Second)
	if _, again := tries.delayAfter(unavailable, false); again {
		t.Error("sent again after the time to resume")
	}
}

func TestAFullQueueIsWaitedForByARequestThatWasRunning(t *testing.T) {
	tries := newTries(options{})
	if _, again := tries.delayAfter(overloaded, true); again {
		t.Error("a full queue is waited for by a new request")
	}
	tries.progressed()
	tries.delayAfter(unavailable, false)
	if delay, again := tries.delayAfter(overloaded, false); !again || delay != 700*time.Millisecond {
		t.Errorf("delay is %v, %v; the server said 700 ms", delay, again)
	}
}

func TestWhatIsSentAgainGoesOnBehindWhatHasCome(t *testing.T) {
	tries := newTries(options{})
	if tries.next() != tries.request {
		t.Error("what nothing has come of is sent as it is")
	}
	tries.builder.add(&octavov1.GenerateResponse{
		RequestId: "drawn",
		Prompt:    &octavov1.PromptInfo{Seed: 7, ModelDigest: "d", TokenIds: []uint32{1, 2}},
		Deltas: []*octavov1.SampleDelta{
			{TokenIds: []uint32{5}, Text: "é", Logprobs: []*octavov1.TokenLogprobs{{TokenId: 5, Logprob: -0.5}}},
			{SampleIndex: 1, FinishReason: octavov1.FinishReason_FINISH_REASON_STOP},
		},
	})
	again := tries.next()
	expected := &octavov1.Resume{
		PromptTokenIds: []uint32{1, 2},
		Seed:           7,
		ModelDigest:    "d",
		Samples: []*octavov1.ResumedSample{
			{TokenIds: []uint32{5}, TextByteCount: 2, CumulativeLogprob: -0.5},
			{SampleIndex: 1, FinishReason: octavov1.FinishReason_FINISH_REASON_STOP},
		},
	}
	if !proto.Equal(again.GetResume(), expected) {
		t.Errorf("resume is %v, not %v", again.GetResume(), expected)
	}
	if again.GetRequestId() != "drawn" || len(again.GetTokenIds().GetIds()) != 2 || again.Output.ReturnPromptTokenIds {
		t.Errorf("the request sent again is %v", again)
	}
	if tries.request.GetResume() != nil {
		t.Error("the first request was changed")
	}
}

func TestAddresses(t *testing.T) {
	for _, address := range []string{"127.0.0.1:50051", "localhost:1", "[::1]:50051", "unix:/tmp/router.sock"} {
		if err := checkAddress(address); err != nil {
			t.Error(err)
		}
	}
	for _, address := range []string{"", "localhost", "http://localhost:50051", "localhost:0", "localhost:65536", "unix:"} {
		if checkAddress(address) == nil {
			t.Errorf("%q was taken", address)
		}
	}
}
