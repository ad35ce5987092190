// The flows of openai-js; as flows.py has it, for Node.
import OpenAI from 'openai';
import { VERSION } from 'openai/version';

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none-needed', maxRetries: 0 });
const messages = [{ role: 'user', content: 'What is 12 + 30?' }];
const ask = (more = {}) =>
  client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, ...more });
const check = (condition, what) => {
  if (!condition) throw new Error(`not as it should be: ${JSON.stringify(what)}`);
};

const flows = [
  ['models.list', '', async () => {
    const names = [];
    for await (const card of client.models.list()) names.push(card.id);
    check(names.includes(model), names);
  }],
  ['chat', '', async () => {
    const reply = await ask();
    check(reply.choices[0].message.content && reply.usage.total_tokens > 0, reply);
  }],
  ['chat, streamed', '', async () => {
    let said = '';
    for await (const event of await ask({ stream: true })) {
      said += event.choices[0]?.delta?.content ?? '';
    }
    check(said === (await ask()).choices[0].message.content, said);
  }],
  ['chat.completions.stream helper', '', async () => {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 16 });
    check(await stream.finalContent(), 'a text');
  }],
  ['completions', '', async () => {
    const reply = await client.completions.create({ model, prompt: 'Once', max_tokens: 4 });
    check(reply.choices[0].text, reply);
  }],
  ['an error keeps its status', '', async () => {
    const fault = await ask({ model: 'no-such-model' }).catch((error) => error);
    check(fault instanceof OpenAI.NotFoundError, fault);
  }],
  ['response_format: json_object', 'schema', async () => {
    const reply = await ask({ response_format: { type: 'json_object' }, max_tokens: 200 });
    check(typeof JSON.parse(reply.choices[0].message.content) === 'object', reply);
  }],
  ['responses.create', 'responses', async () => {
    const reply = await client.responses.create({ model, input: 'Hello', max_output_tokens: 8 });
    check(reply.output_text, reply);
  }],
  ['embeddings', 'embeddings', async () => {
    const reply = await client.embeddings.create({ model, input: 'Hello' });
    check(reply.data[0].embedding.length > 8, reply.usage);
  }],
];

for (const [name, needs, run] of flows) {
  let fault = '';
  try {
    await run();
  } catch (error) {
    fault = String(error).slice(0, 300);
  }
  console.log(JSON.stringify({ client: 'openai-js', version: VERSION, flow: name, needs, fault }));
}
