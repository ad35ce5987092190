// What do the vendored modules offer, as far as the pages use it?
declare module "preact" {
  export function createElement(...parts: any[]): any;
  export function render(node: any, parent: Element): void;
}
declare module "preact/hooks" {
  export function useState<T>(first: T | (() => T)): [T, (next: T | ((old: T) => T)) => void];
  export function useEffect(effect: () => void | (() => void), inputs?: readonly unknown[]): void;
  export function useLayoutEffect(effect: () => void | (() => void), inputs?: readonly unknown[]): void;
  export function useMemo<T>(make: () => T, inputs?: readonly unknown[]): T;
  export function useRef<T>(first: T): { current: T };
  export function useErrorBoundary(tell?: (error: any) => void): [any, () => void];
}
declare module "@preact/signals" {
  export interface Signal<T> { value: T; }
  export function signal<T>(first: T): Signal<T>;
  export function useSignal<T>(first: T): Signal<T>;
  export function batch(work: () => void): void;
}
declare module "htm" {
  const htm: { bind(make: (...parts: any[]) => any): (words: TemplateStringsArray, ...values: any[]) => any };
  export default htm;
}
