// OpenAI's client for JavaScript, unchanged, against the server whose address is given. Prints what it saw as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const seen = {};

seen.models = [];
for await (const model of client.models.list()) seen.models.push(model.id);

const whole = await client.chat.completions.create({ model: "fake", messages, max_tokens: 6, n: 2, logprobs: true });
seen.whole = whole.choices.map((choice) => choice.message.content);
seen.logprobs = whole.choices[0].logprobs.content.length;
seen.usage = whole.usage.completion_tokens;

seen.streamed = "";
const stream = await client.chat.completions.create({
  model: "fake", messages, max_tokens: 6, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  seen.streamed += chunk.choices[0]?.delta.content ?? "";
  seen.streamedUsage = chunk.usage?.completion_tokens;
}

const runner = client.chat.completions.stream({ model: "fake", messages, max_tokens: 6 });
seen.helper = (await runner.finalChatCompletion()).choices[0].message.content;

const completion = await client.completions.create({ model: "fake", prompt: ["hi", "ho"], max_tokens: 4 });
seen.completions = completion.choices.map((choice) => choice.text);

try {
  await client.chat.completions.create({ model: "fake", messages, temperature: 9 });
} catch (error) {
  seen.error = { status: error.status, param: error.param, bad: error instanceof OpenAI.BadRequestError };
}
console.log(JSON.stringify(seen));
