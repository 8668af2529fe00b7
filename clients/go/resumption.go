package octavo

import (
	"math/rand"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	octavov1 "octavo/v1"
)

const (
	defaultResumeTimeout = time.Minute
	firstDelay           = 50 * time.Millisecond
	maxDelay             = time.Second
)

// resumption is one request's tries: whether and when it is sent again after its server went away, and what is sent then.
// See "Resume" in docs/api.md. It does no I/O.
type resumption struct {
	request *octavov1.GenerateRequest
	builder *outputBuilder
	// timeout is from a loss until it is given up.
	timeout time.Duration
	// mayResume is set once a server has taken the request on, or from the start where a server is waited for.
	mayResume bool
	now       func() time.Time
	givesUpAt time.Time
	delay     time.Duration
}

func newResumption(request *octavov1.GenerateRequest, builder *outputBuilder, options *options) *resumption {
	return &resumption{
		request:   request,
		builder:   builder,
		timeout:   options.resumeTimeout,
		mayResume: options.waitForServer,
		now:       time.Now,
		delay:     firstDelay,
	}
}

// next is the request for the next try: it goes on behind what has come.
func (r *resumption) next() *octavov1.GenerateRequest {
	resume := r.builder.resume()
	if resume == nil {
		return r.request
	}
	again := proto.Clone(r.request).(*octavov1.GenerateRequest)
	again.RequestId = r.builder.requestID
	// The prompt as it was rendered: a template that knows the date may render another one now.
	again.Prompt = &octavov1.GenerateRequest_TokenIds{TokenIds: &octavov1.TokenIds{Ids: resume.GetPromptTokenIds()}}
	again.Output.ReturnPromptTokenIds = false
	again.Resume = resume
	return again
}

// progressed says that a response has come: the server is there, and a loss from now on is another one.
func (r *resumption) progressed() {
	r.mayResume = true
	r.givesUpAt = time.Time{}
	r.delay = firstDelay
}

// delayAfter is the time until the next try after a call that failed; false where the error is the request's end.
// accepted: whether the server had taken the call on. A full queue is waited for only by a request that was.
func (r *resumption) delayAfter(err *Error, accepted bool) (time.Duration, bool) {
	r.mayResume = r.mayResume || accepted
	if !r.mayResume || err.Code != codes.Unavailable && err.RetryAfter == 0 {
		return 0, false
	}
	now := r.now()
	delay := err.RetryAfter
	if delay == 0 {
		// Many callers lose one server at the same moment; they should not come back at the same one.
		delay = time.Duration(float64(r.delay) * (0.5 + rand.Float64()/2))
		r.delay *= 2
		if r.delay > maxDelay {
			r.delay = maxDelay
		}
	} else if r.givesUpAt.IsZero() {
		return 0, false
	}
	if r.givesUpAt.IsZero() {
		r.givesUpAt = now.Add(r.timeout)
	}
	left := r.givesUpAt.Sub(now)
	if left <= 0 {
		return 0, false
	}
	if delay > left {
		delay = left
	}
	return delay, true
}
