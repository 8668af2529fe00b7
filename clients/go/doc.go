// Package octavo is the Go client of Octavo's gRPC contract.
//
//	client, err := octavo.NewClient("127.0.0.1:50051")
//	stream := client.Stream(ctx, &octavov1.GenerateRequest{
//		Prompt: &octavov1.GenerateRequest_Text{Text: "The capital of France is"},
//		Stop:   &octavov1.StopConditions{MaxTokens: proto.Uint32(16)},
//	})
//	defer stream.Close()
//	for stream.Next() {
//		fmt.Print(stream.Delta().GetText())
//	}
//	err = stream.Err()
//
// Deadlines and cancellation are the context's. A generation whose server goes away goes on by itself, with no token lost
// or doubled, on the server that is found at the same address within WithResumeTimeout. The contract's messages, and stubs
// for calls that Client does not wrap, are in package octavo/v1.
package octavo
