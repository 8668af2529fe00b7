package octavo

import (
	"sort"

	octavov1 "octavo/v1"
)

// ToolCall is a call of a tool that a sample made.
type ToolCall struct {
	ID, Name, ArgumentsJSON string
}

// Sample is one sample, as far as it has come.
type Sample struct {
	Index    uint32
	Text     string
	TokenIDs []uint32
	// Logprobs has one entry for each token, if asked for.
	Logprobs []*octavov1.TokenLogprobs
	// FinishReason is FINISH_REASON_UNSPECIFIED while the sample runs.
	FinishReason octavov1.FinishReason
	// MatchedStop is the stop string that was found, and MatchedTokenID the token that was sampled, if one of them
	// stopped the sample.
	MatchedStop    string
	MatchedTokenID *uint32
	// CumulativeLogprob is the sum over the sample's tokens, once it has ended.
	CumulativeLogprob float64
	// Content is the text without the calls, and ToolCalls the calls, where the request has tools.
	Content   string
	ToolCalls []ToolCall
}

// Output is one request's answer, as far as it has come.
type Output struct {
	RequestID string
	Model     string
	// Prompt is what the router made of the prompt; nil until it has said so.
	Prompt *octavov1.PromptInfo
	// Samples are in order of their index.
	Samples []Sample
	// Usage is nil until the request has finished.
	Usage *octavov1.Usage
}

// collected is a sample with what a resume needs beside it.
type collected struct {
	Sample
	logprobSum float64
}

// outputBuilder collects the responses to one request. One that was resumed goes on in the same builder.
type outputBuilder struct {
	requestID      string
	model          string
	prompt         *octavov1.PromptInfo
	promptTokenIDs []uint32
	samples        map[uint32]*collected
	usage          *octavov1.Usage
}

func newOutputBuilder(request *octavov1.GenerateRequest) *outputBuilder {
	return &outputBuilder{
		requestID:      request.GetRequestId(),
		promptTokenIDs: request.GetTokenIds().GetIds(),
		samples:        map[uint32]*collected{},
	}
}

func (b *outputBuilder) isFinished() bool {
	return b.usage != nil
}

// add takes the next response.
func (b *outputBuilder) add(response *octavov1.GenerateResponse) {
	if response.GetRequestId() != "" {
		b.requestID = response.GetRequestId()
	}
	if response.GetModel() != "" {
		b.model = response.GetModel()
	}
	if prompt := response.GetPrompt(); prompt != nil {
		if b.prompt == nil {
			b.prompt = prompt
		}
		if len(prompt.GetTokenIds()) > 0 {
			b.promptTokenIDs = prompt.GetTokenIds()
		}
	}
	for _, delta := range response.GetDeltas() {
		b.take(delta)
	}
	if response.GetUsage() != nil {
		b.usage = response.GetUsage()
	}
}

func (b *outputBuilder) take(delta *octavov1.SampleDelta) {
	sample := b.samples[delta.GetSampleIndex()]
	if sample == nil {
		sample = &collected{Sample: Sample{Index: delta.GetSampleIndex()}}
		b.samples[delta.GetSampleIndex()] = sample
	}
	sample.Text += delta.GetText()
	sample.TokenIDs = append(sample.TokenIDs, delta.GetTokenIds()...)
	sample.Logprobs = append(sample.Logprobs, delta.GetLogprobs()...)
	for _, entry := range delta.GetLogprobs() {
		sample.logprobSum += float64(entry.GetLogprob()) // one by one, as the server adds them up
	}
	sample.Content += delta.GetParsed().GetContent()
	for _, gained := range delta.GetParsed().GetToolCalls() {
		for uint32(len(sample.ToolCalls)) <= gained.GetIndex() {
			sample.ToolCalls = append(sample.ToolCalls, ToolCall{})
		}
		call := &sample.ToolCalls[gained.GetIndex()]
		call.ID += gained.GetId()
		call.Name += gained.GetName()
		call.ArgumentsJSON += gained.GetArgumentsJson()
	}
	if reason := delta.GetFinishReason(); reason != octavov1.FinishReason_FINISH_REASON_UNSPECIFIED {
		sample.FinishReason = reason
		sample.CumulativeLogprob = delta.GetCumulativeLogprob()
		switch matched := delta.GetMatched().(type) {
		case *octavov1.SampleDelta_MatchedStop:
			sample.MatchedStop = matched.MatchedStop
		case *octavov1.SampleDelta_MatchedTokenId:
			sample.MatchedTokenID = &matched.MatchedTokenId
		}
	}
}

// sorted are the samples in order of their index.
func (b *outputBuilder) sorted() []*collected {
	samples := make([]*collected, 0, len(b.samples))
	for _, sample := range b.samples {
		samples = append(samples, sample)
	}
	sort.Slice(samples, func(i, j int) bool { return samples[i].Index < samples[j].Index })
	return samples
}

// output is the answer as far as it has come: a copy, which does not change any more.
func (b *outputBuilder) output() Output {
	output := Output{RequestID: b.requestID, Model: b.model, Prompt: b.prompt, Usage: b.usage}
	for _, sample := range b.sorted() {
		copied := sample.Sample
		copied.TokenIDs = append([]uint32(nil), sample.TokenIDs...)
		copied.Logprobs = append([]*octavov1.TokenLogprobs(nil), sample.Logprobs...)
		copied.ToolCalls = append([]ToolCall(nil), sample.ToolCalls...)
		output.Samples = append(output.Samples, copied)
	}
	return output
}

// resume is what a server needs to go on behind what has come; nil before it has told what it made of the prompt.
func (b *outputBuilder) resume() *octavov1.Resume {
	if b.prompt == nil || b.promptTokenIDs == nil {
		return nil
	}
	resume := &octavov1.Resume{
		PromptTokenIds: b.promptTokenIDs,
		Seed:           b.prompt.GetSeed(),
		ModelDigest:    b.prompt.GetModelDigest(),
	}
	for _, sample := range b.sorted() {
		resume.Samples = append(resume.Samples, &octavov1.ResumedSample{
			SampleIndex:       sample.Index,
			TokenIds:          sample.TokenIDs,
			TextByteCount:     uint32(len(sample.Text)),
			FinishReason:      sample.FinishReason,
			CumulativeLogprob: sample.logprobSum,
		})
	}
	return resume
}
