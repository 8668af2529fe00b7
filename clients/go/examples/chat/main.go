// Command chat asks a running server one question and prints the answer as it comes:
//
//	go run ./examples/chat "What is the capital of France?"
//
// OCTAVO_ADDRESS is the server's gRPC address, OCTAVO_API_KEY its key, where it asks for one.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/protobuf/proto"
	"octavo"
	octavov1 "octavo/v1"
)

func main() {
	question := "What is the capital of France?"
	if len(os.Args) > 1 {
		question = os.Args[1]
	}
	address := os.Getenv("OCTAVO_ADDRESS")
	if address == "" {
		address = octavo.DefaultAddress
	}
	client, err := octavo.NewClient(address, octavo.WithAPIKey(os.Getenv("OCTAVO_API_KEY")))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	stream := client.Stream(ctx, &octavov1.GenerateRequest{
		Prompt: &octavov1.GenerateRequest_Chat{Chat: &octavov1.ChatPrompt{
			Messages: []*octavov1.ChatMessage{{Role: "user", Content: question}},
		}},
		Sampling: &octavov1.SamplingParams{Temperature: proto.Float32(0)},
		Stop:     &octavov1.StopConditions{MaxTokens: proto.Uint32(128)},
	})
	defer stream.Close()
	for stream.Next() {
		fmt.Print(stream.Delta().GetText())
	}
	if err := stream.Err(); err != nil {
		log.Fatal(err)
	}
	usage := stream.Output().Usage
	fmt.Printf("\n(%d tokens in, %d out)\n", usage.GetPromptTokenCount(), usage.GetCompletionTokenCount())
}
