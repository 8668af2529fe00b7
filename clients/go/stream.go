package octavo

import (
	"context"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	octavov1 "octavo/v1"
)

const acceptedKey = "octavo-accepted"

// Stream is a running generation. Iterate with Next and Delta, then look at Err; Output is all that has come so far. It
// goes on behind what has come where its server goes away and comes back. Close it, or cancel its context, to cancel the
// request. A Stream is for one goroutine at a time.
type Stream struct {
	ctx        context.Context
	cancel     context.CancelFunc
	open       func(context.Context, *octavov1.GenerateRequest) (octavov1.InferenceService_GenerateClient, error)
	address    string
	builder    *outputBuilder
	resumption *resumption
	call       octavov1.InferenceService_GenerateClient
	ready      []*octavov1.SampleDelta
	delta      *octavov1.SampleDelta
	isOver     bool
	err        error
}

// Next waits for the next delta, which Delta then returns. It returns false at the end, after an error and after Close.
func (s *Stream) Next() bool {
	for len(s.ready) == 0 && !s.isOver {
		response, err := s.receive()
		switch {
		case err == nil:
			s.resumption.progressed()
			s.builder.add(response)
			s.ready = response.GetDeltas()
		case s.builder.isFinished(): // what was lost then is but the status behind the last response
			s.end(nil)
		case err == io.EOF:
			name := s.builder.requestID
			s.end(&Error{
				Code:    codes.Internal,
				Message: fmt.Sprintf("the server ended the stream of request %q without a last response", name),
			})
		default:
			s.retry(err)
		}
	}
	if len(s.ready) == 0 {
		return false
	}
	s.delta, s.ready = s.ready[0], s.ready[1:]
	return true
}

// Delta is what Next has found: what one sample gained.
func (s *Stream) Delta() *octavov1.SampleDelta {
	return s.delta
}

// Err is what ended the stream early: an *Error, or nil after a whole answer and after Close.
func (s *Stream) Err() error {
	return s.err
}

// Output is the answer as far as it has come.
func (s *Stream) Output() Output {
	return s.builder.output()
}

// Close cancels the request if it still runs. It may be called again.
func (s *Stream) Close() {
	s.end(nil)
	s.ready = nil
}

func (s *Stream) end(err error) {
	if !s.isOver {
		s.isOver, s.err = true, err
	}
	s.cancel()
}

// receive is the next response of the running call, which is started where there is none.
func (s *Stream) receive() (*octavov1.GenerateResponse, error) {
	if s.call == nil {
		call, err := s.open(s.ctx, s.resumption.next())
		if err != nil {
			return nil, err
		}
		s.call = call
	}
	return s.call.Recv()
}

// retry waits until the request is to be sent again, or ends the stream with the error.
func (s *Stream) retry(err error) {
	failure := errorOf(err, s.address)
	delay, again := s.resumption.delayAfter(failure, s.isAccepted())
	s.call = nil
	if s.ctx.Err() != nil && failure.Code == codes.Unavailable {
		failure, again = contextError(s.ctx), false
	}
	if !again {
		s.end(failure)
		return
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.ctx.Done():
		s.end(contextError(s.ctx))
	}
}

// isAccepted tells whether the call that failed had been taken on by the server.
func (s *Stream) isAccepted() bool {
	if s.call == nil {
		return false
	}
	header, err := s.call.Header()
	return err == nil && len(header.Get(acceptedKey)) > 0
}

func contextError(ctx context.Context) *Error {
	if ctx.Err() == context.DeadlineExceeded {
		return &Error{Code: codes.DeadlineExceeded, Message: "the deadline passed while the server was away"}
	}
	return &Error{Code: codes.Canceled, Message: "the request was cancelled"}
}
